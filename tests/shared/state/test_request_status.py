"""The status of a request whose messages and workers are not what they should be."""

import secrets

import pytest
from nats.js import JetStreamContext

from shared.bus.bus import Bus
from shared.codec import envelope
from shared.errors import Cancelled, InvalidRequest
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import (
    AttemptRecord,
    Heartbeat,
    PoolPlan,
    RequestRecord,
    ScalePlan,
    StartReport,
)
from shared.protocol.reading import RequestStatus
from shared.protocol.records import StageSpan
from shared.state import request_status
from shared.state.request_list import RequestLister
from shared.state.token_log import LogWriter, end_request
from tests.tasks import engine_task


async def put_task(bus: Bus, request_id: str, data: bytes) -> None:
    subject = subjects.stage("engine", "m", "batch", request_id)
    await bus.publish(subject, data, f"{request_id}:1:engine:0")


async def put_attempt(bus: Bus, request_id: str, worker: str) -> None:
    attempt = AttemptRecord("engine", worker, 1, bus.now_ms(), 0)
    await bus.publish_without_id(subjects.attempts(request_id), to_json(attempt))


async def test_a_task_that_cannot_be_decoded_has_a_status(bus: Bus, request_id: str) -> None:
    await put_task(bus, request_id, b"garbage")
    status = await request_status.find(bus, request_id)
    assert (status.state, status.stage, status.path) == ("queued", "engine", [])


async def test_foreign_bytes_on_every_subject_do_not_hide_the_status(
    bus: Bus, request_id: str
) -> None:
    await put_task(bus, request_id, envelope.encode(engine_task(request_id, [1]), []))
    worker = f"engine-{secrets.token_hex(4)}"
    await put_attempt(bus, request_id, worker)
    beat = Heartbeat("engine", worker, "0", 1, ["m"], {})
    await bus.heartbeats.publish(worker, to_json(beat))
    for subject in (
        subjects.attempts(request_id),
        subjects.append(request_id),
        subjects.heartbeat(f"foreign-{secrets.token_hex(4)}"),
    ):
        await bus.publish_without_id(subject, b"\xff")
    status = await request_status.find(bus, request_id)
    assert (status.state, status.worker, status.records) == ("running", worker, 0)
    assert status.why == f"{worker} works on it"


async def test_a_request_counts_the_tasks_of_its_own_slot(bus: Bus) -> None:
    model, worker = f"m-{secrets.token_hex(4)}", f"engine-{secrets.token_hex(4)}"
    for slot, num_tasks in ((None, 1), (3, 2)):
        durable = subjects.stage_consumer("engine", model, "batch", slot)
        where = subjects.stage_filter("engine", model, "batch", slot)
        await bus.queues.create(subjects.STAGES_STREAM, durable, where, 30.0)
        for number in range(num_tasks):
            name = f"{model}-{slot}-{number}"
            data = envelope.encode(engine_task(name, [1], model=model), [])
            await bus.publish(subjects.stage("engine", model, "batch", name, slot), data, name)
    beat = Heartbeat("engine", worker, "0", 1, [model], {})
    await bus.heartbeats.publish(worker, to_json(beat))
    status = await request_status.find(bus, f"{model}-3-0")
    assert (status.state, status.stage) == ("queued", "engine")
    assert "2 tasks are queued, 0 in flight" in status.why


async def test_a_request_says_that_no_worker_lives_or_that_one_starts(
    bus: Bus, request_id: str
) -> None:
    stage = f"stage-{secrets.token_hex(4)}"
    subject = subjects.stage(stage, "m", "batch", request_id)
    await bus.publish(subject, envelope.encode(engine_task(request_id, [1]), []), request_id)
    nobody = f"no worker of stage {stage} for model m is alive"
    assert (await request_status.find(bus, request_id)).why == nobody
    for model, reason in (("other", nobody), ("m", f"{nobody}; {stage}-m is starting: loading")):
        report = StartReport("engine", f"{stage}-{model}", "0", 1, "loading", model, stage)
        await bus.heartbeats.publish_start(report.worker, to_json(report))
        assert (await request_status.find(bus, request_id)).why == reason


@pytest.mark.parametrize("parts", ["3", "0", "4097", "1000000000", "2.5", "true", '"2"', "null"])
async def test_a_foreign_number_of_parts_is_no_record(
    bus: Bus, request_id: str, parts: str, jetstream: JetStreamContext
) -> None:
    record = RequestRecord("completion", "m", "", 0, durable=False, options={"parts": 3})
    data = to_json(record).replace(b'"parts":3', b'"parts":' + parts.encode())
    await bus.publish_without_id(subjects.job(request_id), data)
    status = await request_status.find(bus, request_id)
    assert (status.state, "3 prompts" in status.why) == ("unknown", parts == "3")
    # The list is cut, and other tests leave hundreds of tasks.
    await jetstream.purge_stream(subjects.STAGES_STREAM)
    listed = [row.request_id for row in (await RequestLister(bus).update()).requests]
    assert (request_id in listed) == (parts != "3")


async def test_records_are_counted_under_a_record_of_an_unknown_kind(
    bus: Bus, request_id: str
) -> None:
    await put_task(bus, request_id, b"garbage")
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens([])
    later = b'{"type":"a later kind","index":1,"attempt":1}'
    await bus.publish_without_id(subjects.append(request_id), later)
    assert (await request_status.find(bus, request_id)).records == 1


async def test_a_worker_with_other_figures_than_an_engine_works_on_its_request(
    bus: Bus, request_id: str
) -> None:
    task = engine_task(request_id, [1])
    task.header.path.append(StageSpan("renderer", "renderer-1", 1, 0.0, 1.0))
    await put_task(bus, request_id, envelope.encode(task, []))
    worker = f"talker-{secrets.token_hex(4)}"
    await put_attempt(bus, request_id, worker)
    await bus.heartbeats.publish(
        worker, to_json(Heartbeat("talker", worker, "0", 1, ["m"], {"waiting": 2.0}))
    )
    status = await request_status.find(bus, request_id)
    assert (status.state, status.why) == ("running", f"{worker} works on it")
    assert [span.stage for span in status.path] == ["renderer"]


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_a_published_request_is_found_before_a_coordinator_reads_it(
    bus: Bus, request_id: str, tenant: str
) -> None:
    scoped = names.scoped_id(request_id, tenant)
    await bus.publish_without_id(subjects.request("org/m.5", scoped), b"{}")
    status = await request_status.find(bus, scoped)
    assert (status.state, status.model) == ("queued", "org/m.5")
    assert "coordinator" in status.why
    for other in ("", "acme", "other"):
        if other != tenant:
            found = await request_status.find(bus, names.scoped_id(request_id, other))
            assert found.state == "unknown"
    stream = subjects.REQUESTS_STREAM
    await bus.purge(stream, subjects.requests_with_id(scoped)[stream])


async def test_an_id_is_used_by_a_request_and_not_by_a_cancellation(bus: Bus) -> None:
    ids = [f"req-{secrets.token_hex(6)}@acme" for _ in range(5)]
    queued, claimed, written, cancelled, _ = ids
    await bus.publish_without_id(subjects.request("m", queued), b"{}")
    await put_task(bus, claimed, b"garbage")
    await (await LogWriter.open(bus, written, 1)).tokens([])
    await end_request(bus, written, 1, Cancelled("on request"), [])
    await end_request(bus, cancelled, 1, Cancelled("on request"), [])
    used = [request_id for request_id in ids if await request_status.is_used(bus, request_id)]
    assert used == [queued, claimed, written]
    stream = subjects.REQUESTS_STREAM
    await bus.purge(stream, subjects.requests_with_id(queued)[stream])


async def test_an_id_without_a_tenant_is_found_among_all_tenants(bus: Bus, request_id: str) -> None:
    async def find(name: str = request_id) -> RequestStatus:
        return await request_status.find_any_tenants(bus, name)

    # An output of another request may have the same name.
    log = await LogWriter.open(bus, f"{request_id}-x", 1, request_id)
    await log.media("text/plain", 0, data="")
    assert (await find()).state == "unknown"
    await bus.publish_without_id(subjects.request("m", f"{request_id}@a"), b"{}")
    assert ((await find()).request_id, (await find()).state) == (f"{request_id}@a", "queued")
    await (await LogWriter.open(bus, f"{request_id}@b", 1)).tokens([])
    with pytest.raises(InvalidRequest, match=f"name one of {request_id}@a, {request_id}@b"):
        await find()
    assert (await find(f"{request_id}@b")).records == 1
    await (await LogWriter.open(bus, request_id, 1)).tokens([])
    await bus.publish_without_id(subjects.request("m", request_id), b"{}")
    assert (await find()).request_id == request_id
    stream = subjects.REQUESTS_STREAM
    for name in (request_id, f"{request_id}@a"):
        await bus.purge(stream, subjects.requests_with_id(name)[stream])


async def test_a_tenants_request_with_several_prompts_is_found_by_its_id(
    bus: Bus, request_id: str
) -> None:
    record = RequestRecord("completion", "m", "acme", 0, durable=False, options={"parts": 2})
    await bus.publish_without_id(subjects.job(f"{request_id}@acme"), to_json(record))
    await (await LogWriter.open(bus, f"{request_id}~0@acme", 1)).tokens([])
    status = await request_status.find_any_tenants(bus, request_id)
    assert status.request_id == f"{request_id}@acme"
    assert f"{request_id}~0@acme to {request_id}~1@acme" in status.why


async def test_a_request_for_a_pool_without_workers_says_what_the_pool_does(
    bus: Bus, request_id: str
) -> None:
    # No other test has a worker of this model.
    subject = subjects.stage("engine", "scaled", "batch", request_id)
    await bus.publish(subject, b"", f"{request_id}:1:engine:0")
    plan = ScalePlan("leader", {"engine/scaled": PoolPlan(1, starting=1, starting_s=2.0)})
    await bus.publish_without_id(subjects.SCALE_PLAN, to_json(plan))
    status = await request_status.find(bus, request_id)
    await bus.purge(subjects.SCALE_STREAM, ">")
    assert status.why.endswith("is alive; pool engine/scaled is starting for 2 s")
    assert status.pool == "pool starting for 2 s"
    assert (await request_status.find(bus, request_id)).pool is None


async def test_an_order_for_a_batch_is_no_request_with_its_id(bus: Bus, request_id: str) -> None:
    stream, subject = subjects.REQUESTS_STREAM, f"pm.request.@acme.{subjects.BATCH_ORDER}"
    await bus.publish_without_id(f"{subject}.{request_id}", b"{}")
    assert (await request_status.find(bus, f"{request_id}@acme")).state == "unknown"
    assert not await request_status.is_used(bus, f"{request_id}@acme")
    assert (await request_status.find_any_tenants(bus, request_id)).request_id == request_id
    await bus.purge(stream, f"{subject}.{request_id}")
