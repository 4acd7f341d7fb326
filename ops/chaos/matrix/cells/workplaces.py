"""Cells in which workers have a bad environment: no disk to write to, a wrong clock."""

import asyncio
from functools import partial
from pathlib import Path

from ops.chaos.alterations import environment, sleep_by_select
from ops.chaos.history import now
from ops.chaos.matrix.cell import cannot_run, cell
from ops.chaos.matrix.cells.common import WORKER_S, altered, fill, new_id, one_of_each
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import ROOT
from ops.chaos.processes.brokers import mount_disk, unmount
from shared.bus.bus import Bus
from shared.protocol.records import Failure
from shared.protocol.sampling import SamplingParams


@cell("disk: log disk full", "stderr of workers on a full tmpfs", "5 s")
async def log_disk_full(deployment: Deployment) -> None:
    """Run workers that log every step to a full disk."""
    disk = deployment.folder / "small"
    mount_disk(disk, 1)
    try:
        fill(disk)
        script = f'exec "$@" 2>>{disk}/log'
        command = ["env", "PAGEMILL_LOG_LEVEL=debug", "sh", "-c", script, "sh"]
        async with altered(deployment, one_of_each(deployment), *command):
            await deployment.probe("without_logs", WORKER_S)
            await asyncio.sleep(4.0)
    finally:
        unmount(disk)


cannot_run("disk: cache disk full", "no worker caches anything on a disk")


@cell("disk: read-only root", "workers in a mount namespace without a writable path", "5 s")
async def read_only_root(deployment: Deployment) -> None:
    """Run workers on a read-only file system, with only the run's folder writable."""
    folder = deployment.folder
    script = (
        f"mount --bind {folder} {folder} && mount --bind / / && mount -o remount,bind,ro /"
        ' && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    async with altered(deployment, one_of_each(deployment), *command):
        await deployment.probe("read_only", WORKER_S)
        await asyncio.sleep(4.0)


_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


def why_no_faketime() -> str | None:
    return None if Path(_FAKETIME).exists() else "libfaketime is not installed (apt: faketime)"


_clock = partial(cell, bound="deadline + 2 s", needs=why_no_faketime, load_s=10)
_HOW = "libfaketime {} on one worker of each role"


@_clock("clock: +1 h", _HOW.format("+1h"), fake_time="+1h")
@_clock("clock: -1 h", _HOW.format("-1h"), fake_time="-1h")
@_clock("clock: drift 2 s/s", _HOW.format("+0 x3"), fake_time="+0 x3")
async def clock(deployment: Deployment, fake_time: str) -> None:
    """Give worker 0 of each role another wall clock; its monotonic clock is correct."""
    command = [
        *environment(sleep_by_select),
        f"LD_PRELOAD={_FAKETIME}",
        f"FAKETIME={fake_time}",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
        "DONT_FAKE_MONOTONIC=1",
    ]
    async with altered(deployment, one_of_each(deployment), *command):
        await deployment.probe("wrong_clock", WORKER_S)
        async with deployment.bus("clock") as bus:
            for number in range(6):
                await _deadline_is_kept(deployment, bus, number)
    await asyncio.to_thread(_clean_up_after_faketime)


def _clean_up_after_faketime() -> None:
    """Remove the shared memory that libfaketime leaves when its process is killed."""
    for left in Path("/dev/shm").glob("*faketime_*"):
        left.unlink(missing_ok=True)


async def _deadline_is_kept(deployment: Deployment, bus: Bus, number: int) -> None:
    """Check that an answer which takes too long ends at its deadline."""
    began = now()
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    records = await deployment.ask(bus, new_id(f"late-{number}"), sampling, timeout_s=1.0)
    end, took_s = records[-1], now() - began
    code = end.error.code if isinstance(end, Failure) else "finish"
    if code != "deadline_exceeded" or not 0.85 < took_s < 3.0:
        deployment.note(f"I1: a deadline of 1 s ended with {code} after {took_s:.2f} s")
    deployment.outcome.note_largest("deadline_s", took_s)


# These compare the current time with the modification times of files.
_READS_FILE_AGES = ("shared/native/library.py", "shared/vision/embedding_directory.py")


@cell("clock: none read", "a search of the source", load_s=1)
async def no_wall_clock(deployment: Deployment) -> None:
    """Search the product's source for reads of the wall clock, which only file ages may need."""
    for folder in ("shared", "workers"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for number, line in enumerate(file.read_text().splitlines(), 1):
                reads = "time.time(" in line or "datetime.now(" in line or "utcnow(" in line
                if reads and name not in _READS_FILE_AGES:
                    deployment.note(f"{name}:{number} reads the wall clock")
