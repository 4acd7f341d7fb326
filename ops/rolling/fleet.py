"""Worker processes of two versions of the code at one broker without keys."""

import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ops.harness.deployment import ROOT, broker, write_config
from ops.harness.processes import Processes, processes, worker_command

_OPS = ROOT / "ops"
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


_CONFIG: dict[str, Any] = {
    "models": {"demo": _DEMO | {"stages": _VOICE}, "painter": _PAINTER},
    "nats": {"unchecked": True},
    "blobs": {"inline_kib": 1},
    "metrics": {"port": 0},
}


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder, without a link to this repository."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder


class Fleet:
    """The workers that run, by version and name."""

    def __init__(self, processes: Processes, config: Path, trees: dict[str, Path]) -> None:
        """`trees` has the files of the versions `old` and `new`."""
        self.processes = processes
        self._config = config
        self._trees = trees

    async def start(self, version: str, *names: str) -> None:
        """Start these workers of `WORKERS`, and wait until all are ready."""
        tree, url = self._trees[version], self.processes.url
        await self.processes.start(
            {
                f"{version} {name}": worker_command(
                    *WORKERS[name], config=self._config, url=url, tree=tree, threads=1
                )
                for name in names
            }
        )

    async def stop(self, version: str, name: str) -> None:
        """Drain a worker."""
        await self.processes.stop(f"{version} {name}")


@contextlib.asynccontextmanager
async def running(trees: dict[str, Path]) -> AsyncIterator[Fleet]:
    """Run a separate broker, whose streams the first coordinator creates."""
    with tempfile.TemporaryDirectory(prefix="pagemill-rolling-") as name:
        folder = Path(name)
        config = write_config(_CONFIG, folder)
        async with (
            broker(folder) as server,
            processes(server.url, folder / "workers.log") as workers,
        ):
            yield Fleet(workers, config, trees)
