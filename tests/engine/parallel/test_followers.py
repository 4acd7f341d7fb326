"""Processes of ranks that hang while they load, meet, and run the first step."""

import io
import os
import signal
import subprocess
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ops.harness.machine import has_ended
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.registry import adapt
from shared.vision.rank_plan import Share
from shared.vision.weights import load_weights
from tests.models.test_generic import build
from tests.support.waiting import until
from workers.engine.loader import warm_up
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.parallel import followers as followers_module
from workers.engine.parallel import process_group, rank_watch
from workers.engine.parallel.followers import starting
from workers.engine.parallel.rank_watch import RankWatch
from workers.engine.parallel.sharded_model import RankMemory

OWN = cast(DecoderModel, SimpleNamespace(device=torch.device("cpu")))


def join(
    engine: EngineConfig, pids: list[int], number: int | None = None, own: DecoderModel = OWN
) -> None:
    """Start two ranks, send a signal to the other one, wait for it, and warm up rank 0's `own`."""
    with starting(ModelConfig("m"), engine) as followers:
        assert followers is not None
        pids += [process.pid for process in followers._processes]
        if number is not None:
            os.kill(pids[0], number)
        warm_up(followers.join(own), 4)


async def test_a_rank_that_is_stopped_while_it_loads_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_watch, "LOOK_S", 0.1)
    engine, pids = EngineConfig(tensor_parallel=2, step_timeout_s=0.5), list[int]()
    reason = r"engine\.tensor_parallel: rank 1 has not computed for 0\.5 s .* while rank 0 waited"
    with pytest.raises(ConfigError, match=reason):
        join(engine, pids, signal.SIGSTOP)
    await until(partial(has_ended, pids[0]))


async def test_a_rank_that_does_not_meet_the_others_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers_module, "MODULE", "tests.engine.parallel.absent_rank")
    monkeypatch.setattr(process_group, "MEETING", timedelta(seconds=0.2))
    pids: list[int] = []
    reason = r"rank 0 has not met all of the other ranks \(1\) within"
    with pytest.raises(ConfigError, match=reason):
        join(EngineConfig(tensor_parallel=2), pids)
    await until(partial(has_ended, pids[0]))


async def test_a_rank_that_stops_in_the_first_step_is_named_but_no_rank_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_watch, "LOOK_S", 0.1)
    monkeypatch.setattr(followers_module, "MODULE", "tests.engine.parallel.stopping_rank")
    model = build("llama")
    model.save_pretrained(tmp_path)
    share = load_weights(type(model), tmp_path, model.dtype, "cpu", share=Share(0, 2))
    engine, pids = EngineConfig(tensor_parallel=2, step_timeout_s=0.5), list[int]()
    with pytest.raises(ConfigError, match=r"rank 1 has not computed for 0\.5 s"):
        join(engine, pids, own=FlatModel(adapt(share)))
    assert "computed" in capfd.readouterr().err
    await until(partial(has_ended, pids[0]))


def test_a_rank_that_hangs_while_its_memory_is_measured_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_watch, "LOOK_S", 0.01)
    source, sink = os.pipe()
    with (
        subprocess.Popen(["sleep", "60"]) as idle,
        os.fdopen(source, "rb") as answers,
        os.fdopen(sink, "wb"),
    ):
        memory = RankMemory(io.BytesIO(), answers, 0, RankWatch({1: idle.pid, 2: idle.pid}, 0.05))
        with pytest.raises(ConfigError, match=r"ranks 1, 2 have not computed for 0\.05 s"):
            memory.peak()
        idle.kill()
