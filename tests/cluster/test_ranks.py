"""An engine of two ranks: each of them is killed while it answers."""

import signal
from functools import partial
from pathlib import Path

from shared.bus.bus import Bus
from tests.cluster.conftest import (
    CONFIG,
    answer,
    parent_of,
    request_text,
    start_cluster,
    stop_cluster,
)
from tests.cluster.streams import attempts_of, read_amid_signal, tokens_of
from tests.support.waiting import until


def processes() -> set[int]:
    return {int(file.name) for file in Path("/proc").iterdir() if file.name.isdigit()}


def are_gone(pids: set[int]) -> bool:
    return not pids & processes()


async def test_answers_continue_after_the_death_of_each_rank(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path, CONFIG + "engine: {tensor_parallel: 2, threads: 1}\n")
    bus = await Bus.connect(cluster.url, "test")
    request = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=300)
    expected = tokens_of(await answer(bus, request))
    for killed in ("follower", "leader"):
        leader = await cluster.pid(bus, "engine")
        (follower,) = (pid for pid in processes() if parent_of(pid) == leader)
        pid = leader if killed == "leader" else follower
        records = await read_amid_signal(bus, request, pid, signal.SIGKILL)
        assert tokens_of(records) == expected
        assert len(attempts_of(records)) == 2
        await until(partial(are_gone, {leader, follower}), 30)
    await bus.close()
    assert stop_cluster(cluster) == 0
    # Neither the death of a leader nor a drain is a failure of the follower.
    assert cluster.log.read_text().count("rank_failed") == 1
