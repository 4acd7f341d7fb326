"""Worker processes of two versions of the code at one broker without keys."""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat

NEW = Path(__file__).parents[2]
_OPS = NEW / "ops"
WORKERS = {
    "vocoder": ("generator", "--model", "demo", "--stage", "code2wav"),
    "painter": ("generator", "--model", "painter"),
    "talker": ("engine", "--model", "demo", "--stage", "talker"),
    "engine": ("engine", "--model", "demo"),
    "prefill": ("prefill", "--model", "demo"),
    "encoder": ("encoder", "--model", "demo"),
    "renderer": ("renderer",),
    "coordinator": ("coordinator",),
    "agent": ("agent",),
    "gateway": ("gateway",),
}
"""The workers of a fleet: each one's role and options, in the order of a rolling upgrade."""
MAKES_MEDIA = ("vocoder", "painter", "talker")
START_S = 180.0
_DEMO: dict[str, Any] = {
    "path": str(_OPS / "demo_model"),
    "max_model_len": 1024,
    "tower": "encoder",
    "prefill": "prefill",
    "min_prefill_tokens": 64,
    "sampling_defaults": {"temperature": 0.0, "max_tokens": 8},
}
_VOICE: dict[str, Any] = {
    "talker": {
        "role": "engine",
        "path": str(_OPS / "demo_voice" / "talker"),
        "inputs": {"text": {"from": "engine", "function": "speech", "mode": "stream"}},
        "output": {"name": "codes", "kind": "codes"},
        "sampling_defaults": {"temperature": 0.0, "max_tokens": 40},
        "voices": ["alloy"],
    },
    "code2wav": {
        "role": "generator",
        "path": str(_OPS / "demo_voice"),
        "inputs": {"codes": {"from": "talker", "function": "follow", "mode": "stream"}},
        "output": {"name": "audio", "kind": "audio"},
        "chunks": {"first": [3, 5], "size": 8, "left": 2, "right": 2},
    },
}
_PAINTER: dict[str, Any] = {
    "path": str(_OPS / "demo_painter"),
    "stages": {
        "renderer": {"enabled": False},
        "engine": {"enabled": False},
        "dit": {
            "role": "generator",
            "inputs": {"prompt": {"from": "request", "function": "paint"}},
            "output": {"name": "image", "kind": "image"},
            "sizes": ["90x90"],
            "sampling_defaults": {"steps": 4},
        },
    },
}


def config_of(makes_media: bool) -> dict[str, Any]:
    """Return the configuration of a fleet, with or without a voice and a painter."""
    models = {"demo": _DEMO}
    if makes_media:
        models = {"demo": _DEMO | {"stages": _VOICE}, "painter": _PAINTER}
    return {
        "models": models,
        "nats": {"unchecked": True},
        "blobs": {"inline_kib": 1},
        "gateway": {"port": 0},
        "metrics": {"port": 0},
    }


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder, without a link to this repository."""
    archive = subprocess.run(["git", "archive", commit], cwd=NEW, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@dataclass(eq=False)
class Fleet:
    """The workers that run, by version and name."""

    url: str
    config: Path
    trees: dict[str, Path]
    """`old` and `new` → the files of that version."""
    log: Path
    _running: dict[tuple[str, str], asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, version: str, *names: str) -> None:
        """Start these workers of `WORKERS`, and wait until all are ready."""
        for name in names:
            tree = self.trees[version]
            with self.log.open("ab") as stderr:
                self._running[version, name] = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "workers",
                    "worker",
                    *WORKERS[name],
                    "--config",
                    str(self.config),
                    "--nats",
                    self.url,
                    cwd=tree,
                    env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                    stderr=stderr,
                )
        wanted = {self._running[version, name].pid for name in names}
        async with asyncio.timeout(START_S):
            while not await self._are_ready(wanted):
                for name in names:
                    ended = self._running[version, name].returncode
                    assert ended is None, f"the {version} {name} has ended with {ended}"
                await asyncio.sleep(0.2)

    async def stop(self, version: str, *names: str) -> None:
        """Drain these workers."""
        ending = [self._running.pop((version, name)) for name in names]
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

    async def _are_ready(self, pids: set[int]) -> bool:
        """Whether these workers are ready; not if the broker is too busy to say."""
        with contextlib.suppress(Unavailable):
            return pids <= {beat.pid for beat in await self.beats()}
        return False

    async def gateways(self) -> list[str]:
        """Return the URLs of the gateways that run."""
        return [beat.url for beat in await self.beats() if beat.url is not None]

    async def stop_all(self) -> None:
        for version in self.trees:
            names = [name for of, name in self._running if of == version]
            with contextlib.suppress(ProcessLookupError):
                await self.stop(version, *names)


@contextlib.asynccontextmanager
async def running(
    folder: Path, trees: dict[str, Path], *, makes_media: bool
) -> AsyncIterator[Fleet]:
    """Run a broker of its own, whose streams the first coordinator creates."""
    server = EmbeddedServer(folder / "nats")
    await asyncio.to_thread(server.start)
    config = folder / "pagemill.yaml"
    config.write_text(json.dumps(config_of(makes_media)), encoding="utf-8")
    fleet = Fleet(server.url, config, trees, folder / "workers.log")
    try:
        yield fleet
    finally:
        await fleet.stop_all()
        await asyncio.to_thread(server.stop)
