"""The processes of the other ranks, started and watched by rank 0."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import structlog
import torch.distributed as dist

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, first_sentence
from shared.vision.rank_plan import FIELD, Share
from workers.engine.cuda.profiling import ClaimedMemory
from workers.engine.model.flat_model import DecoderModel
from workers.engine.parallel import messages
from workers.engine.parallel.messages import Loaded, Start
from workers.engine.parallel.process_group import MEETING, ProcessGroup
from workers.engine.parallel.rank_watch import RankWatch
from workers.engine.parallel.sharded_model import RankMemory, ShardedModel

PYTHON = (sys.executable, "-P")
MODULE = "workers.engine.follower"
DEVICES = "CUDA_VISIBLE_DEVICES"
_log = structlog.get_logger()


class _Process:
    """A process of a rank, with pipes to it."""

    def __init__(self, rank: int, env: dict[str, str]) -> None:
        """Start it. Raises OSError."""
        self.rank = rank
        self._env = env
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._may_end = True
        # Linux ends the process together with the thread that started it, see `end_with_parent`.
        # A thread of a pool might end early.
        threading.Thread(target=self._run, name=f"rank {rank}", daemon=True).start()
        process = self._started.result()
        self.pid = process.pid
        self.commands = cast(BinaryIO, process.stdin)
        self.answers = cast(BinaryIO, process.stdout)

    def _run(self) -> None:
        try:
            process = subprocess.Popen(
                [*PYTHON, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._env,
            )
        except OSError as error:
            self._started.set_exception(error)
            return
        self._started.set_result(process)
        code = process.wait()
        if not self._may_end:
            _log.error("rank_failed", rank=self.rank, exit_code=code)
            os._exit(1)

    def must_live(self) -> None:
        """End this process when the other one ends: another engine then gets the requests."""
        self._may_end = False

    def kill(self) -> None:
        self._may_end = True
        self._started.result().kill()
        self.commands.close()
        self.answers.close()

    def receive_loaded(self, idle_s: float) -> Loaded:
        """Return the answer to `Start`.

        Raises ConfigError if the process ends before it, or neither computes nor reads from a disk
        for `idle_s`.
        """
        message = RankWatch({self.rank: self.pid}, idle_s).receive(self.answers)
        if message is None:
            raise ConfigError(f"{FIELD}: rank {self.rank} ended while it was loaded", field=FIELD)
        loaded = messages.answers.decode(message)
        assert isinstance(loaded, Loaded)
        return loaded


class Followers:
    """Processes that load their parts of a model while rank 0 loads its part."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, folder: Path) -> None:
        """Start them. `folder` is empty, and must exist until `join` has returned."""
        self._store = str(folder / "store")
        self._num_ranks = engine.tensor_parallel
        self._timeout_s = engine.step_timeout_s
        self._processes: list[_Process] = []
        self.memories: list[ClaimedMemory] = []
        """Memory of the ranks' GPUs, after `join`."""
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for rank in range(1, self._num_ranks):
            process = _Process(rank, env | _device_of(rank, engine))
            self._processes.append(process)
            start = Start(model, engine, rank, self._store)
            messages.send(process.commands, msgspec.msgpack.encode(start))

    def join(self, own: DecoderModel) -> ShardedModel:
        """Return the model of all ranks, once each has its part. Raises ConfigError.

        From then on this process ends if another rank ends.
        """
        pids = {process.rank: process.pid for process in self._processes}
        watch = RankWatch(pids, self._timeout_s)
        for process in self._processes:
            loaded = process.receive_loaded(self._timeout_s)
            if loaded.refusal:
                raise ConfigError(loaded.refusal, field=FIELD)
            process.must_live()
            if loaded.memory_limit is not None:
                memory = RankMemory(process.commands, process.answers, loaded.free_memory, watch)
                self.memories.append(ClaimedMemory(memory, loaded.memory_limit))
        store = dist.FileStore(self._store, self._num_ranks)
        share = Share(0, self._num_ranks)
        try:
            group = ProcessGroup(store, share, own.device, watch)
        except RuntimeError as error:
            ranks = ", ".join(map(str, pids))
            raise ConfigError(
                f"{FIELD}: rank 0 has not met all of the other ranks ({ranks}) within {MEETING}:"
                f" {first_sentence(error)}",
                field=FIELD,
            ) from error
        _log.info("ranks_joined", pids=[*pids.values()])
        return ShardedModel(own, group, [process.commands for process in self._processes])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def starting(model: ModelConfig, engine: EngineConfig) -> Iterator[Followers | None]:
    """Start the processes of the other ranks, if there are any; an error ends them."""
    if engine.tensor_parallel == 1:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pagemill-ranks-") as folder:
        followers = Followers(model, engine, Path(folder))
        try:
            yield followers
        except BaseException:
            followers.kill()
            raise


def _device_of(rank: int, engine: EngineConfig) -> dict[str, str]:
    """Return the environment by which a rank finds its device as the first one."""
    if engine.device == "cpu":
        return {}
    visible = os.environ.get(DEVICES)
    if visible is None:
        return {DEVICES: str(rank)}
    devices = visible.split(",")
    if len(devices) < engine.tensor_parallel:
        raise ConfigError(
            f"{FIELD}: {engine.tensor_parallel} ranks need a device each, but {DEVICES} has"
            f" {len(devices)}",
            field=FIELD,
        )
    return {DEVICES: devices[rank]}
