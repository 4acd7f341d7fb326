"""Tenants that use too much of a busy model: what counts as too much, and where they go."""

import secrets
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.bus import Bus
from shared.config.schema import Config, ModelConfig
from shared.protocol import subjects
from shared.protocol.names import scoped_id, split_id
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.sampling import SamplingParams
from shared.stage.job import Job
from shared.stage.pipelines import pipeline_of
from shared.stage.runtime import Context
from workers.coordinator import turns as turns_module
from workers.coordinator.admission import Admitted, admit
from workers.coordinator.turns import FACTOR, HALF_LIFE_S, MANY_CLAIMED, TenantUse, Turns
from workers.coordinator.worker import Coordinator

USES = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(1, 100), st.floats(0, 20)), min_size=1, max_size=40
)


@given(USES)
def test_a_tenant_that_is_alone_never_uses_too_much(uses: list[tuple[str, float, float]]) -> None:
    use, now_s = TenantUse({"a": 0.1}), 0.0
    for _, cost, pause_s in uses:
        now_s += pause_s
        use.add("a", cost, now_s)
        assert not use.exceeds_share("a")


@given(st.integers(2, 6), st.floats(0.01, 2), st.integers(1, 20))
def test_tenants_that_use_alike_never_use_too_much(num: int, pause_s: float, turns: int) -> None:
    use, now_s = TenantUse({}), 0.0
    tenants = [f"t{i}" for i in range(num)]
    for _ in range(turns):
        for tenant in tenants:
            use.add(tenant, 1.0, now_s)
        now_s += pause_s
    assert not any(map(use.exceeds_share, tenants))


@given(USES, st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10)))
def test_somebody_is_always_within_its_share(
    uses: list[tuple[str, float, float]], weights: dict[str, float]
) -> None:
    use, now_s = TenantUse(weights), 0.0
    for tenant, cost, pause_s in uses:
        now_s += pause_s
        use.add(tenant, cost, now_s)
        assert not all(map(use.exceeds_share, {tenant for tenant, *_ in uses}))


def test_a_flood_uses_too_much_until_it_has_faded_or_its_weight_allows_it() -> None:
    light, heavy = TenantUse({}), TenantUse({"flood": 10.0})
    for use in (light, heavy):
        use.add("steady", 1.0, 0.0)
        use.add("flood", 10.0, 0.0)
    assert light.exceeds_share("flood")
    assert not light.exceeds_share("steady")
    assert not heavy.exceeds_share("flood")
    light.add("steady", 4.0, 2 * HALF_LIFE_S)
    assert not light.exceeds_share("flood"), "2.5 of 6.75"
    assert light.exceeds_share("steady"), f"4.25 is more than {FACTOR} times the mean"


# -- lanes ----------------------------------------------------------------------------------------


def admitted(model: str, tenant: str = "", **fields: Any) -> Admitted:
    config = ModelConfig(path="/nowhere")
    request = GenerateRequest(model, prompt="x", **fields)
    data, models = encode_request(request), {model: config}
    request_id = scoped_id("r", tenant)
    subject = subjects.request(model, request_id)
    return admit(subject, request_id, data, models, {model: pipeline_of(config)})


async def fill(bus: Bus, model: str, num_tasks: int, stage: str = "engine") -> None:
    durable = subjects.stage_consumer(stage, model, "batch")
    where = subjects.stage_filter(stage, model, "batch")
    consumer = await bus.queues.consume(subjects.STAGES_STREAM, durable, where, MANY_CLAIMED, 60.0)
    for number in range(num_tasks):
        name = f"{model}-{stage}-{number}"
        await bus.publish(subjects.stage(stage, model, "batch", name), b"x", name)
    for _ in range(min(num_tasks, MANY_CLAIMED)):
        await consumer.next()
    await consumer.stop()


@pytest.mark.parametrize(
    ("num_tasks", "expected"),
    [(MANY_CLAIMED - 1, "interactive"), (MANY_CLAIMED, "batch"), (MANY_CLAIMED + 1, "batch")],
)
async def test_a_tenant_that_uses_too_much_of_a_busy_model_loses_its_turn(
    bus: Bus, num_tasks: int, expected: str
) -> None:
    model = f"m-{secrets.token_hex(4)}"
    await fill(bus, model, num_tasks)
    turns = Turns(bus, {})
    short, long = admitted(model), admitted(model, sampling_params=SamplingParams(max_tokens=1000))
    assert await turns.lane_of(short, "steady", 100) == "interactive"
    assert await turns.lane_of(long, "flood", 100) == expected
    assert await turns.lane_of(short, "steady", 100) == "interactive"
    # The same tenant does nothing to another model.
    other = admitted(f"{model}-other", sampling_params=SamplingParams(max_tokens=1000))
    assert await turns.lane_of(other, "flood", 100) == "interactive"


async def test_tasks_of_all_stages_make_a_model_busy(bus: Bus) -> None:
    model = f"m-{secrets.token_hex(4)}"
    await fill(bus, model, MANY_CLAIMED - 1)
    await fill(bus, model, 1, stage="renderer")
    turns = Turns(bus, {})
    await turns.lane_of(admitted(model), "steady", 100)
    long = admitted(model, sampling_params=SamplingParams(max_tokens=1000))
    assert await turns.lane_of(long, "flood", 100) == "batch"


async def test_a_model_stays_busy_between_two_tasks(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "READ_S", 0.0)
    monkeypatch.setattr(turns_module, "BUSY_S", 1e9)
    model = f"m-{secrets.token_hex(4)}"
    await fill(bus, model, MANY_CLAIMED)
    turns = Turns(bus, {})
    await turns.lane_of(admitted(model), "steady", 100)
    long = admitted(model, sampling_params=SamplingParams(max_tokens=1000))
    assert await turns.lane_of(long, "flood", 100) == "batch"
    durable = subjects.stage_consumer("engine", model, "batch")
    await bus.connection.js.delete_consumer(subjects.STAGES_STREAM, durable)
    assert await turns.lane_of(long, "flood", 100) == "batch"
    monkeypatch.setattr(turns_module, "BUSY_S", 0.0)
    assert await turns.lane_of(long, "flood", 100) == "interactive"


async def test_a_burst_makes_a_model_busy_before_its_tasks_are_claimed(bus: Bus) -> None:
    model = f"m-{secrets.token_hex(4)}"
    turns = Turns(bus, {})
    await turns.lane_of(admitted(model), "steady", 100)
    long = admitted(model, sampling_params=SamplingParams(max_tokens=1000))
    lanes = [await turns.lane_of(long, "flood", 100) for _ in range(24)]
    assert lanes == ["interactive"] * MANY_CLAIMED + ["batch"] * (24 - MANY_CLAIMED)
    assert await turns.lane_of(admitted(model), "steady", 100) == "interactive"
    # Requests for another model do not count.
    assert await turns.lane_of(admitted(f"{model}-2"), "flood", 10**7) == "interactive"


async def test_requests_of_the_batch_lane_stay_there(bus: Bus) -> None:
    assert await Turns(bus, {}).lane_of(admitted("m", lane="batch"), "a", 100) == "batch"


async def test_queues_that_cannot_be_read_are_read_once(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "STAGES_STREAM", "NO_SUCH_STREAM")
    turns = Turns(bus, {})
    streams = []
    depths = bus.figures.depths

    async def counted(stream: str) -> Any:
        streams.append(stream)
        return await depths(stream)

    monkeypatch.setattr(bus.figures, "depths", counted)
    await turns.lane_of(admitted("m"), "steady", 100)
    for _ in range(3):
        assert await turns.lane_of(admitted("m"), "flood", 10**7) == "interactive"
    assert len(streams) == 1


async def test_the_tasks_of_a_tenant_that_uses_too_much_are_in_the_batch_lane(bus: Bus) -> None:
    model = f"m-{secrets.token_hex(4)}"
    await fill(bus, model, MANY_CLAIMED)
    config = Config(models={model: ModelConfig(path="/nowhere")})
    context = Context("coordinator", "coordinator-1", "", config, bus, structlog.get_logger())
    coordinator = Coordinator(context)
    long = SamplingParams(max_tokens=1000)
    for tenant, params in (("steady", SamplingParams()), ("flood", long)):
        request_id = scoped_id("r", tenant)
        request = GenerateRequest(model, prompt="x", sampling_params=params)
        delivery: Any = delivery_of(bus, request, request_id)
        await coordinator.admit_or_end(Job(delivery, bus.now_ms(), request_id))
        lane = {"steady": "interactive", "flood": "batch"}[tenant]
        subject = subjects.stage("renderer", model, lane, request_id)
        assert await bus.read_last(subjects.STAGES_STREAM, subject) is not None


def delivery_of(bus: Bus, request: GenerateRequest, request_id: str) -> SimpleNamespace:
    async def retry(after_s: float) -> None:
        pass

    return SimpleNamespace(
        subject=subjects.request(request.model, request_id),
        tenant=split_id(request_id)[1],
        data=encode_request(request),
        stored_ms=bus.now_ms(),
        attempt=1,
        sequence=10**9,
        place=subjects.RequestPlace(subjects.REQUESTS_STREAM, 10**9),
        receipt="r",
        headers={},
        retry=retry,
    )
