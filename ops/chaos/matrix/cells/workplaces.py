"""Cells in which a worker has a bad place to live: no disk to write to, a wrong clock."""

import asyncio
from pathlib import Path

from ops.chaos.alterations import environment, sleep_by_select
from ops.chaos.history import now
from ops.chaos.matrix.cells.common import WORKER_S, dressed, fill, new_id, one_of_each
from ops.chaos.matrix.scene import Disturb, Scene, mount_disk, unmount
from ops.chaos.plan import ROOT
from shared.bus.bus import Bus
from shared.protocol.messages import Failure
from shared.protocol.sampling import SamplingParams


async def log_disk_full(scene: Scene) -> None:
    """Workers that log every step to a disk without space."""
    disk = scene.folder / "small"
    mount_disk(disk, 1)
    try:
        fill(disk)
        script = f'exec "$@" 2>>{disk}/log'
        command = ["env", "PAGEMILL_LOG_LEVEL=debug", "sh", "-c", script, "sh"]
        async with dressed(scene, one_of_each(scene), *command):
            await scene.probe("without_logs", WORKER_S)
            await asyncio.sleep(4.0)
    finally:
        unmount(disk)


async def read_only_root(scene: Scene) -> None:
    """Workers whose file system cannot be written to; only our own journal can."""
    folder = scene.folder
    script = (
        f"mount --bind {folder} {folder} && mount --bind / / && mount -o remount,bind,ro /"
        ' && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    async with dressed(scene, one_of_each(scene), *command):
        await scene.probe("read_only", WORKER_S)
        await asyncio.sleep(4.0)


_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


def why_no_faketime() -> str | None:
    return None if Path(_FAKETIME).exists() else "libfaketime is not installed (apt: faketime)"


def clock(fake_time: str) -> Disturb:
    """Worker 0 of each role lives in another time; its monotonic clock is left alone."""

    async def disturb(scene: Scene) -> None:
        command = [
            *environment(sleep_by_select),
            *(f"LD_PRELOAD={_FAKETIME}", f"FAKETIME={fake_time}"),
            *("FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"),
        ]
        async with dressed(scene, one_of_each(scene), *command):
            await scene.probe("wrong_clock", WORKER_S)
            async with scene.bus("clock") as bus:
                for number in range(6):
                    await _deadline_is_kept(scene, bus, number)
        await asyncio.to_thread(_clean_up_after_faketime)

    return disturb


def _clean_up_after_faketime() -> None:
    """It leaves shared memory behind when its process is killed."""
    for left in Path("/dev/shm").glob("*faketime_*"):
        left.unlink(missing_ok=True)


async def _deadline_is_kept(scene: Scene, bus: Bus, number: int) -> None:
    """An answer that is too long for its time ends at its deadline: not before, not much later."""
    began = now()
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    records = await scene.ask(bus, new_id(f"late-{number}"), sampling, timeout_s=1.0)
    end, took_s = records[-1], now() - began
    code = end.error.code if isinstance(end, Failure) else "finish"
    if code != "deadline_exceeded" or not 0.85 < took_s < 3.0:
        scene.note(f"I1: a deadline of 1 s ended with {code} after {took_s:.2f} s")
    scene.outcome.figures["deadline_s"] = max(took_s, scene.outcome.figures.get("deadline_s", 0))


# These compare the current time with the modification times of files.
_READS_FILE_AGES = ("shared/native/library.py", "shared/vision/embedding_directory.py")


async def no_wall_clock(scene: Scene) -> None:
    """Search the product's source for reads of the wall clock, which only file ages may need."""
    for folder in ("shared", "workers"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for number, line in enumerate(file.read_text().splitlines(), 1):
                reads = "time.time(" in line or "datetime.now(" in line or "utcnow(" in line
                if reads and name not in _READS_FILE_AGES:
                    scene.note(f"{name}:{number} reads the wall clock")
