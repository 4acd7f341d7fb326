"""An engine of two ranks: each of them is killed, and one hangs, while it answers."""

import signal
from functools import partial
from pathlib import Path

import pytest

from ops.harness.machine import has_ended
from tests.cluster.conftest import (
    CONFIG,
    answer,
    connected,
    parent_of,
    request_text,
    running_cluster,
    stop_cluster,
)
from tests.cluster.streams import attempts_of, read_amid_signal, tokens_of
from tests.preloaded import WITHOUT_FORKED_RANKS
from tests.support.waiting import until

ENGINE = "engine: {tensor_parallel: 2, threads: 1, step_timeout_s: 3}\n"


def processes() -> set[int]:
    return {int(file.name) for file in Path("/proc").iterdir() if file.name.isdigit()}


async def test_answers_continue_after_the_end_and_the_hang_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WITHOUT_FORKED_RANKS, "1")
    request = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=200)
    faults = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    with running_cluster(tmp_path, CONFIG + ENGINE) as cluster:
        async with connected(cluster) as bus:
            expected = tokens_of(await answer(bus, request))
            for rank, fault in ((1, "killed"), (1, "stopped"), (0, "killed")):
                num_attempts = 1
                while num_attempts == 1:  # Until a signal comes before the end of the answer.
                    leader = await cluster.pid(bus, "engine")
                    (follower,) = (pid for pid in processes() if parent_of(pid) == leader)
                    pid = follower if rank else leader
                    records = await read_amid_signal(bus, request, pid, faults[fault])
                    assert tokens_of(records) == expected
                    # A rank that hangs is noticed in the next step.
                    assert tokens_of(await answer(bus, request)) == expected
                    for rank_pid in (leader, follower):
                        await until(partial(has_ended, rank_pid), 30)
                    num_attempts = len(attempts_of(records))
                assert num_attempts == 2
        assert stop_cluster(cluster) == 0
    # Neither the death of a leader nor a drain is a failure of the follower.
    log = cluster.log.read_text()
    assert [log.count(event) for event in ("rank_failed", "step_hangs")] == [1, 1]
