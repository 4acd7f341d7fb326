"""Processes of ranks that hang before the ranks have met."""

import os
import signal
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ops.harness.machine import has_ended
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from tests.support.waiting import until
from workers.engine.model.flat_model import DecoderModel
from workers.engine.parallel import followers as followers_module
from workers.engine.parallel import process_group
from workers.engine.parallel.followers import starting

OWN = cast(DecoderModel, SimpleNamespace(device=torch.device("cpu")))


def join(engine: EngineConfig, pids: list[int], number: int | None = None) -> None:
    """Start two ranks, send a signal to the other one, and wait for it."""
    with starting(ModelConfig("m"), engine) as followers:
        assert followers is not None
        pids += [process.pid for process in followers._processes]
        if number is not None:
            os.kill(pids[0], number)
        followers.join(OWN)


async def test_a_rank_that_is_stopped_while_it_loads_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers_module, "LOOK_S", 0.1)
    engine, pids = EngineConfig(tensor_parallel=2, step_timeout_s=0.5), list[int]()
    reason = r"engine\.tensor_parallel: rank 1 has not computed for 0\.5 s .* while it was loaded"
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
