"""Worker processes of two versions of the code at one broker without keys."""

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login
from shared.protocol.messages import Heartbeat

NEW = Path(__file__).parents[2]
ROLES = ("engine", "prefill", "encoder", "renderer", "coordinator", "gateway")
"""In the order in which a rolling upgrade restarts them."""
START_S = 180.0
CONFIG = """
models:
  demo:
    path: {model}
    max_model_len: 1024
    tower: encoder
    prefill: prefill
    min_prefill_tokens: 64
    sampling_defaults: {{temperature: 0.0, max_tokens: 8}}
nats: {{unchecked: true}}
blobs: {{inline_kib: 1}}
gateway: {{port: 0}}
metrics: {{port: 0}}
"""


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder, without a link to this repository."""
    archive = subprocess.run(["git", "archive", commit], cwd=NEW, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@dataclass(eq=False)
class Fleet:
    """The workers that run, by role and version."""

    url: str
    config: Path
    trees: dict[str, Path]
    """`old` and `new` → the files of that version."""
    log: Path
    _running: dict[tuple[str, str], asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, version: str, *roles: str) -> None:
        """Start a worker of each role, and wait until all are ready."""
        for role in roles:
            tree = self.trees[version]
            with self.log.open("ab") as stderr:
                self._running[version, role] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "workers", "worker", role, "--model", "demo"),
                    *("--config", str(self.config), "--nats", self.url),
                    cwd=tree,
                    env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                    stderr=stderr,
                )
        wanted = {self._running[version, role].pid for role in roles}
        async with asyncio.timeout(START_S):
            while not wanted <= {beat.pid for beat in await self.beats()}:
                for role in roles:
                    ended = self._running[version, role].returncode
                    assert ended is None, f"the {version} {role} has ended with {ended}"
                await asyncio.sleep(0.2)

    async def stop(self, version: str, *roles: str) -> None:
        """Drain the workers of these roles."""
        ending = [self._running.pop((version, role)) for role in roles]
        for process in ending:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in ending))

    async def beats(self) -> list[Heartbeat]:
        """Return the heartbeats of this fleet's workers."""
        bus = await Bus.connect(Login(self.url), "rolling")
        try:
            pids = {process.pid for process in self._running.values()}
            return [beat for beat in await bus.read_heartbeats() if beat.pid in pids]
        finally:
            await bus.close()

    async def gateways(self) -> list[str]:
        """Return the URLs of the gateways that run."""
        return [beat.url for beat in await self.beats() if beat.url is not None]

    async def stop_all(self) -> None:
        for version in self.trees:
            roles = [role for of, role in self._running if of == version]
            with contextlib.suppress(ProcessLookupError):
                await self.stop(version, *roles)


@contextlib.asynccontextmanager
async def running(folder: Path, trees: dict[str, Path]) -> AsyncIterator[Fleet]:
    """Run a broker of its own, whose streams the first coordinator creates."""
    server = EmbeddedServer(folder / "nats")
    await asyncio.to_thread(server.start)
    config = folder / "pagemill.yaml"
    config.write_text(CONFIG.format(model=NEW / "ops" / "demo_model"), encoding="utf-8")
    fleet = Fleet(server.url, config, trees, folder / "workers.log")
    try:
        yield fleet
    finally:
        await fleet.stop_all()
        await asyncio.to_thread(server.stop)
