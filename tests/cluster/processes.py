"""Workers in separate processes, one for each stage, and checks for tests of sound."""

import base64
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.records import AudioChunk, OutputEnd, OutputRecord
from tests import preloaded
from tests.generator import voices
from tests.support.broker import running_broker
from tests.support.waiting import until
from workers.generator.loader import load_vocoder


class Processes:
    """One process of each stage, all with the `pagemill.yaml` of one folder."""

    def __init__(
        self,
        folder: Path,
        url: str,
        workers: Mapping[str, Sequence[str]],
        roles_of: str | None = None,
    ) -> None:
        self.folder, self.url = folder, url
        self._workers = workers
        """Stage → arguments of `pagemill worker`; a worker of all stages by its role."""
        self._roles_of = roles_of
        self._running: dict[str, preloaded.ForkedCommand] = {}

    def fork(self, stage: str, config: Path | None = None) -> preloaded.ForkedCommand:
        """Start another worker of a stage."""
        arguments = ["worker", *self._workers[stage]]
        arguments += ["--config", str(config or self.folder / "pagemill.yaml"), "--nats", self.url]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if self._roles_of is not None:
            env[preloaded.ROLES_OF] = self._roles_of
        with (self.folder / "workers.log").open("ab") as stderr:
            return preloaded.start(arguments, env=env, stderr=stderr)

    def start(self, stage: str) -> None:
        self._running[stage] = self.fork(stage)

    def kill(self, stage: str) -> None:
        """Kill the process of a stage, and start another."""
        self._running[stage].send_signal(signal.SIGKILL)
        self._running[stage].wait()
        self.start(stage)

    def drain(self, stage: str) -> None:
        """Have the process of a stage end in order, and start another."""
        self._running[stage].terminate()
        assert self._running[stage].wait(5) == 0
        self.start(stage)

    def restart_if_dead(self, stage: str) -> int:
        """Start the process of a stage again if it has ended; return how many were started."""
        if self._running[stage].poll() is None:
            return 0
        self.start(stage)
        return 1

    @contextlib.contextmanager
    def stopped(self, stage: str) -> Iterator[None]:
        self._running[stage].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running[stage].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(
    folder: Path, workers: Mapping[str, Sequence[str]], roles_of: str | None = None
) -> Iterator[Processes]:
    """Run a broker and a worker of each stage; the folder has their configuration."""
    with running_broker(folder / "nats") as server:
        processes = Processes(folder, server.url, workers, roles_of)
        try:
            for stage in workers:
                processes.start(stage)
            yield processes
        finally:
            processes.stop()


async def until_records(bus: Bus, stream: str, subject: str, count: int = 1) -> None:
    """Wait until a subject has `count` records."""

    async def has_them() -> bool:
        return len(await bus.read(stream, subject)) >= count

    await until(has_them, 150)


async def until_nothing_is_left(bus: Bus) -> None:
    """Wait until no request and no task is in a queue, and no worker holds one."""
    streams = [subjects.REQUESTS_STREAM, subjects.STAGES_STREAM, subjects.CANCELS_STREAM]

    async def is_empty() -> bool:
        num_queued = sum([(await bus.figures.size(stream))[0] for stream in streams])
        beats = await bus.heartbeats.read()
        return not num_queued and not any(beat.load.get("held") for beat in beats)

    await until(is_empty)


def joined_sound(records: Sequence[OutputRecord]) -> bytes:
    """Check that an output has each sample once and a whole end, and return its samples."""
    *chunks, end = records
    assert isinstance(end, OutputEnd)
    assert not end.cut
    assert [record.index for record in records] == list(range(len(records)))
    pcm = b""
    for chunk in chunks:
        assert isinstance(chunk, AudioChunk)
        assert chunk.sample_rate == 24_000
        assert chunk.first_sample == len(pcm) // 2
        pcm += base64.b64decode(chunk.pcm, validate=True)
        assert chunk.first_sample + chunk.num_samples == len(pcm) // 2
    assert end.summary.units == {"samples": len(pcm) // 2}
    return pcm


def sound_of(folder: Path, codes: Sequence[int]) -> bytes:
    """Return what the vocoder in `voice` alone makes of all codes in one piece."""
    if not codes:
        return b""
    vocoder = load_vocoder(folder / "voice", ChunkSpec(), "the stage")
    return voices.whole(vocoder, np.array(codes, np.int32)[:, None]).astype("<i2").tobytes()
