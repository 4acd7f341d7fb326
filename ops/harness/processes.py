"""Worker processes that are started and stopped by hand, and not replaced when they end."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ops.harness.deployment import ROOT
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat

START_S = 180.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments of `python -m`, and the folder of the code that it runs."""

    arguments: tuple[str, ...]
    tree: Path = ROOT
    env: dict[str, str] = field(default_factory=dict)


def worker_command(
    role: str, *options: str, config: Path, url: str, tree: Path = ROOT, threads: int | None = None
) -> Command:
    """Return the command of a worker, which runs the code in `tree`."""
    arguments = ("workers", "worker", role, *options, "--config", str(config), "--nats", url)
    return Command(arguments, tree, {"OMP_NUM_THREADS": str(threads)} if threads else {})


class Processes:
    """Worker processes by name, at one broker without keys."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, commands: Mapping[str, Command]) -> None:
        """Start processes, and wait until each is ready.

        Raises RuntimeError when one of them ends, and TimeoutError.
        """
        for name, command in commands.items():
            self.running[name] = await self._open(command)
        async with asyncio.timeout(START_S):
            while not await self._are_ready({self.running[name].pid for name in commands}):
                for name in commands:
                    if (code := self.running[name].returncode) is not None:
                        raise RuntimeError(f"{name} ended with code {code}; see {self.log}")
                await asyncio.sleep(POLL_S)

    async def stop(self, *names: str) -> None:
        """Drain processes, and wait for their end; without names, all of them."""
        await self._end(names, asyncio.subprocess.Process.terminate)

    async def kill(self, *names: str) -> None:
        """Kill processes, and wait for their end; without names, all of them."""
        await self._end(names, asyncio.subprocess.Process.kill)

    async def beats(self) -> list[Heartbeat]:
        """Return the heartbeats of these processes."""
        bus = await Bus.connect(Login(self.url), "harness")
        try:
            pids = {process.pid for process in self.running.values()}
            return [beat for beat in await bus.heartbeats.read() if beat.pid in pids]
        finally:
            await bus.close()

    async def gateways(self) -> list[str]:
        """Return the URLs of the gateways among these processes."""
        return [beat.url for beat in await self.beats() if beat.url is not None]

    async def _open(self, command: Command) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *command.arguments,
                cwd=command.tree,
                env=os.environ | {"PYTHONPATH": str(command.tree)} | command.env,
                stderr=log,
            )

    async def _end(
        self, names: tuple[str, ...], end: Callable[[asyncio.subprocess.Process], None]
    ) -> None:
        ending = [self.running.pop(name) for name in names or [*self.running]]
        for process in ending:
            with contextlib.suppress(ProcessLookupError):
                end(process)
        await asyncio.gather(*(process.wait() for process in ending))

    async def _are_ready(self, pids: set[int]) -> bool:
        """Return whether these processes are ready; False if the broker is too busy to answer."""
        with contextlib.suppress(Unavailable):
            return pids <= {beat.pid for beat in await self.beats()}
        return False


@contextlib.asynccontextmanager
async def processes(url: str, log: Path) -> AsyncIterator[Processes]:
    """Yield a set of processes, which is empty at first and drained at the end."""
    running = Processes(url, log)
    try:
        yield running
    finally:
        await running.stop()
