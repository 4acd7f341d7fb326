"""Pools of real workers that grow from zero and shrink back, and lose no request meanwhile."""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ops.demo import IMAGES, Case
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import Finish
from shared.state import scale_state
from tests.cluster.conftest import (
    CONFIG,
    Cluster,
    answer,
    kill,
    living,
    run,
    start_cluster,
    stop_cluster,
)
from tests.cluster.streams import assert_gapless, text_of
from tests.cluster.test_request import CASES
from tests.support.waiting import until
from workers.cli.ask import build_request
from workers.roles import AUTOSCALER

IDLE_S = 4.0
# The arena is empty when all embeddings are read or have expired.
SCALED = (
    CONFIG.replace("max_model_len: 1024", "max_model_len: 1024\n    tower: encoder")
    + f"""
embeddings: {{ttl_s: 5.0}}
scale:
  pools:
  - {{role: engine, min: 0, max: 2, per_engine: 16, idle_s: {IDLE_S}}}
  - {{role: encoder, min: 0, max: 1, idle_s: {IDLE_S}}}
"""
)
POOLS = ("engine/demo", "encoder/demo")
SCALED_ROLES = ("engine", "encoder")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("scaled"), SCALED)
    yield running
    stop_cluster(running)


@pytest.fixture
async def bus(scaled: Cluster) -> AsyncIterator[Bus]:
    """A connection to the cluster. Its pools are at zero."""
    connection = await Bus.connect(scaled.url, "test")
    await until(lambda: at_zero(connection))
    yield connection
    await connection.close()


async def at_zero(bus: Bus) -> bool:
    """Whether no engine and no encoder lives, as the actuator and the leader say."""
    plan = await scale_state.read_current_plan(bus)
    reports = [await scale_state.read_report(bus, pool) for pool in POOLS]
    return (
        plan is not None
        and [report and report.slots for report in reports] == [[], []]
        and all(plan.pools[pool].wanted == 0 for pool in POOLS if pool in plan.pools)
        and plan.pools.keys() == set(POOLS)
    )


async def has_plan(bus: Bus, pool: str, running: int) -> bool:
    plan = await scale_state.read_current_plan(bus)
    return plan is not None and plan.pools[pool].running == running


async def all_answers(bus: Bus, count: int) -> None:
    """Ask `count` questions at once, half of them about an image, and check every answer."""

    async def one(case: Case | None) -> None:
        text, images = (
            ("What can you do?", [])
            if case is None
            else (case.question, [IMAGES / name for name in case.images])
        )
        records = await answer(bus, build_request("demo", text, images, {}))
        assert_gapless(records)
        assert isinstance(records[-1], Finish), records[-1]
        assert (case.expect if case else "") in text_of(records).lower()

    images = count // 2
    await asyncio.gather(*map(one, [*CASES[:images], *[None] * (count - images)]))


async def test_twenty_requests_for_pools_at_zero_are_answered_and_the_pools_go_back(
    bus: Bus,
) -> None:
    await all_answers(bus, 20)
    ended = time.monotonic()
    await until(lambda: at_zero(bus))
    # Two busy cores are slow to end processes.
    assert time.monotonic() - ended < IDLE_S + 10.0 + 20.0


async def test_a_model_at_zero_is_listed_and_answers_over_http(bus: Bus) -> None:
    url = (await living(bus, "gateway"))[0].url

    def fetch(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=90) as answered:
            return json.load(answered)

    listed = await asyncio.to_thread(fetch, "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["demo"]
    message = {"role": "user", "content": "What can you do?"}
    body = {"model": "demo", "messages": [message]}
    answered = await asyncio.to_thread(fetch, "/v1/chat/completions", body)
    assert answered["choices"][0]["finish_reason"] == "stop"


async def test_a_killed_autoscaler_in_a_wake_up_loses_nothing(scaled: Cluster, bus: Bus) -> None:
    pid = await scaled.pid(bus, AUTOSCALER)
    asking = asyncio.create_task(all_answers(bus, 4))

    async def is_waking() -> bool:
        reports = [await scale_state.read_report(bus, pool) for pool in POOLS]
        return all(reports) and any(report.slots for report in reports if report is not None)

    await until(is_waking)
    kill(pid)
    await asking
    # Its successor takes the lead, and the pools still go back.
    await until(lambda: at_zero(bus))
    plan = await scale_state.read_current_plan(bus)
    assert plan is not None
    assert plan.leader == (await living(bus, AUTOSCALER))[0].worker


async def test_an_operator_sets_a_pool_until_it_is_released(scaled: Cluster, bus: Bus) -> None:
    run(scaled, "scale", "engine=2")
    await until(lambda: has_plan(bus, "engine/demo", 2))
    rows = [json.loads(line) for line in run(scaled, "scale", "--json").splitlines()]
    row = next(row for row in rows if row["pool"] == "engine/demo")
    assert (row["set"], row["state"], row["plan"]["wanted"]) == (2, "running", 2)
    # The order survives the leader.
    kill(await scaled.pid(bus, AUTOSCALER))
    await all_answers(bus, 2)
    await until(lambda: has_plan(bus, "engine/demo", 2))
    run(scaled, "scale", "engine=auto")
    await until(lambda: at_zero(bus))


async def test_a_pause_leaves_pools_as_they_are(scaled: Cluster, bus: Bus) -> None:
    await all_answers(bus, 2)
    run(scaled, "scale", "--pause")
    before = {role: [b.worker for b in await living(bus, role)] for role in SCALED_ROLES}
    await asyncio.sleep(IDLE_S + 2.0)
    assert before == {role: [b.worker for b in await living(bus, role)] for role in SCALED_ROLES}
    run(scaled, "scale", "--resume")
    await until(lambda: at_zero(bus))


async def test_a_deleted_queue_comes_back_and_its_pool_scales(scaled: Cluster, bus: Bus) -> None:
    """A pool without one of its queues has no figures, and keeps its workers until it is back."""
    run(scaled, "scale", "engine=1")
    await until(lambda: has_plan(bus, "engine/demo", 1))
    consumer = subjects.stage_consumer("engine", "demo", "batch")
    await bus.connection.js.delete_consumer(subjects.STAGES_STREAM, consumer)
    run(scaled, "scale", "engine=auto")
    await until(lambda: at_zero(bus))
    assert await bus.figures.depth(subjects.STAGES_STREAM, consumer)


async def test_a_cluster_at_zero_says_so(scaled: Cluster, bus: Bus) -> None:
    assert "at zero" in run(scaled, "scale")
    assert "at zero" in run(scaled, "top", "--once")
