"""One tenant fills the streams that tenants share: nothing of another's is evicted or refused."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from msgspec import structs

from ops.token_logs import read_log
from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.metering import StreamMeter
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.errors import Cancelled, WorkerFailure
from shared.protocol import subjects
from shared.protocol.records import ChoiceDelta, Failure
from shared.protocol.requests import GenerateRequest, Message, tenant_header
from shared.protocol.task_messages import EngineBody, RequestTicket, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Done, Outcome, WorkerLoop
from shared.state import dead_letters, media_store
from shared.state.token_log import LogWriter, end_request
from shared.tenants import storage_quotas
from shared.tenants.storage_quotas import read_exceeded
from tests.gateway.conftest import Gateway, start_gateway_at
from tests.shared.stage.test_worker_loop import SUMMARY, put
from tests.support.waiting import until
from workers.coordinator.storage_meter import StorageMeter
from workers.coordinator.worker import Coordinator
from workers.gateway.http.auth import digest, make_key
from workers.settings import DEMO_MODEL

MIB = 2**20
DELIVERY = DeliveryConfig(max_token_log_mib=2, max_media_mib=8, max_job_mib=1, max_dead_mib=1)
# Unlike logs of real models, few records fill the stream.
RECORD = [ChoiceDelta(0, 0, [1], "x" * 90_000)]


@dataclass
class Site:
    """A broker with small streams, and a gateway with the keys of two tenants."""

    server: EmbeddedServer
    gateway: Gateway
    keys: dict[str, str]

    def http(self, tenant: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.AsyncClient(base_url=self.gateway.url, timeout=60, headers=headers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    server = EmbeddedServer(folder / "nats")
    server.start()
    asyncio.run(_prepare(server))
    keys = {tenant: make_key() for tenant in ("flood", "small")}
    api_keys = [{"name": tenant, "sha256": digest(key)} for tenant, key in keys.items()]
    tree = {
        "models": {"demo": {"path": str(DEMO_MODEL)}},
        "nats": {"unchecked": True},
        "delivery": structs.asdict(DELIVERY),
        "gateway": {"port": 0, "api_keys": api_keys},
    }
    gateway = start_gateway_at(server.url, tree, folder)
    yield Site(server, gateway, keys)
    gateway.stop()
    server.stop()


async def _prepare(server: EmbeddedServer) -> None:
    bus = await Bus.connect(server.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DELIVERY)
    await bus.close()


@pytest.fixture
async def bus(site: Site) -> AsyncIterator[Bus]:
    bus = await Bus.connect(site.server.url, "test")
    for stream in (subjects.TOKENS_STREAM, subjects.MEDIA_STREAM, subjects.DEAD_STREAM):
        await bus.purge(stream, ">")
    await bus.purge(subjects.WORKERS_STREAM, subjects.EXCEEDED_SHARES)
    yield bus
    await bus.close()


def context_of(bus: Bus, role: str, model: str = "demo") -> Context:
    config = Config({model: ModelConfig(str(DEMO_MODEL))}, delivery=DELIVERY)
    return Context(role, f"{role}-{model}", None, config, bus, structlog.get_logger())


async def has_tasks(bus: Bus, subject: str) -> bool:
    return bool(await bus.figures.subjects_of(subjects.STAGES_STREAM, subject))


async def write_log(bus: Bus, request_id: str, num_records: int = 1) -> None:
    """Write what an engine writes for a request."""
    log = await LogWriter.open(bus, request_id, 1)
    for _ in range(num_records):
        await log.tokens(RECORD)
    await log.finish(SUMMARY, {})


async def test_a_flood_of_uploads_leaves_the_media_of_others_whole(site: Site, bus: Bus) -> None:
    content = secrets.token_bytes(MIB)
    async with site.http("small") as small, site.http("flood") as flood:
        first = await small.post("/v1/files", files={"file": ("kept", content)})
        assert first.status_code == 200
        answers = []
        for _ in range(12):
            files = {"file": ("f", secrets.token_bytes(MIB))}
            answers.append(await flood.post("/v1/files", files=files))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 2 <= len(answers) - len(refused) < 5
        error = refused[-1].json()["error"]
        assert (refused[-1].status_code, error["code"]) == (429, "storage_quota_exceeded")
        assert "delivery.max_media_mib" in error["message"]
        assert int(refused[-1].headers["retry-after"]) > 0
        name = hashlib.sha256(content).hexdigest()
        assert await media_store.find(bus, name, MIB, "small") == content
        more = await small.post(
            "/v1/files", files={"file": ("more", secrets.token_bytes(MIB // 2))}
        )
        assert more.status_code == 200
        # Files that the flood deletes make room for it again.
        file_id = answers[0].json()["id"]
        assert (await flood.delete(f"/v1/files/{file_id}")).status_code == 200
        assert (await flood.delete(f"/v1/files/{answers[1].json()['id']}")).status_code == 200


async def test_a_full_share_of_token_logs_refuses_requests_of_its_tenant_alone(
    site: Site, bus: Bus
) -> None:
    await write_log(bus, "kept@small")
    for number in range(13):
        await write_log(bus, f"flood-{number}@flood")

    async def is_told() -> bool:
        return "flood" in {share.tenant for share in await read_exceeded(bus)}

    async def is_admitted() -> bool:
        return await has_tasks(bus, subjects.stages_of("admitted@small"))

    context = context_of(bus, "coordinator")
    running = asyncio.create_task(Coordinator(context).serve())
    try:
        await until(is_told)
        request = GenerateRequest("demo", [Message("user", "?")])
        async with asyncio.timeout(60):
            ended = [r async for r in client.ask(bus, request, "refused@flood")]
        (failure,) = ended
        assert isinstance(failure, Failure)
        assert failure.error.code == "storage_quota_exceeded"
        assert failure.error.retry_after_s
        assert "delivery.max_token_log_mib" in failure.error.message
        records = await bus.figures.subjects_of(subjects.JOBS_STREAM, subjects.JOBS_FILTER)
        body = {"model": "demo", "messages": [{"role": "user", "content": "?"}]}
        for headers in ({}, {"x-request-id": "named"}, {"x-request-id": "named"}):
            async with site.http("flood") as flood:
                answer = await flood.post("/v1/chat/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                429,
                "storage_quota_exceeded",
            )
        assert len(await bus.figures.subjects_of(subjects.JOBS_STREAM, subjects.JOBS_FILTER)) == (
            len(records) + 1
        ), "only a name has a record"
        await client.publish_request(bus, request, "admitted@small")
        await until(is_admitted)
    finally:
        context.shutdown.signal()
        await running
    assert len(await read_log(bus, "kept@small")) == 2


async def test_requests_that_were_admitted_at_one_time_do_not_all_fill_the_stream(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator admits them while nothing is stored; stages look again."""
    monkeypatch.setattr(storage_quotas, "READ_S", 0.0)
    await write_log(bus, "kept@small")
    context, written = context_of(bus, "engine", "burst"), []
    meter = StorageMeter(bus, {})

    async def write(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        await job.log.tokens(RECORD)
        written.append(job.request_id)
        await meter.measure()
        return Done(SUMMARY)

    async def is_done() -> bool:
        return not await has_tasks(bus, "pm.stage.*.burst.>")

    now_ms = bus.now_ms()
    for number in range(30):
        ticket = RequestTicket(now_ms, now_ms + 600_000, 10**6 + number, "none", tenant="flood")
        await put(
            bus, "engine", TaskHeader(f"burst-{number}@flood", "burst", "interactive", ticket)
        )
    loop = WorkerLoop(context)
    await loop.add_stage(["burst"], 4, EngineBody, write)
    running = asyncio.create_task(loop.run())
    try:
        await until(is_done)
    finally:
        context.shutdown.signal()
        await running
        await meter.measure()
    # Its share is ten logs, and four requests run at one time.
    assert 10 <= len(written) <= 14
    assert len(await read_log(bus, "kept@small")) == 2
    ends = [(await read_log(bus, f"burst-{number}@flood"))[-1] for number in range(30)]
    codes = [end.error.code for end in ends if isinstance(end, Failure)]
    assert codes == ["storage_quota_exceeded"] * (30 - len(written))


async def test_dead_letters_of_a_flood_lose_their_content(bus: Bus) -> None:
    for number in range(6):
        tenant = "flood" if number else "small"
        subject = subjects.dead("engine", f"letter-{number}")
        await bus.publish_without_id(subject, bytes(100_000), tenant_header(tenant))
    await StorageMeter(bus, {}).measure()
    stage = context_of(bus, "engine").stage
    for name in ("flood", "small"):
        ticket = RequestTicket(0, 0, 10**6, "none", tenant=name)
        delivery: Any = SimpleNamespace(data=b"input", sequence=1, attempt=1, subject="pm.stage")
        job = Job(delivery, 0, name, TaskHeader(name, "demo", "batch", ticket))
        await stage.write_dead_letter(job, WorkerFailure("failed"), ValueError("failed"))
    letters = [(await dead_letters.find(bus, name)).letter for name in ("flood", "small")]
    assert [letter.input for letter in letters] == [b"", b"input"]
    assert [letter.input_len for letter in letters] == [5, 5]


async def test_what_tenants_have_stored_is_what_the_stream_has(bus: Bus) -> None:
    await write_log(bus, "a-1@a", 4)
    await write_log(bus, "a-2@a", 2)
    # A log that another worker continues counts whole, and so does a cancelled log.
    log = await LogWriter.open(bus, "b-1@b", 1)
    for _ in range(3):
        await log.tokens(RECORD)
    log = await LogWriter.open(bus, "b-1@b", 2)
    for _ in range(3):
        await log.tokens(RECORD)
    await end_request(bus, "b-1@b", 3, Cancelled("cancelled"), [])
    await end_request(bus, "b-2@b", 1, Cancelled("cancelled"), [])
    _, num_bytes = await bus.figures.fill(subjects.TOKENS_STREAM)
    measured = await StreamMeter(bus).measure_tenants(subjects.TOKENS_STREAM)
    assert set(measured) == {"a", "b"}
    assert measured["b"] == pytest.approx(6 * 90_200, rel=0.05)
    assert sum(measured.values()) == pytest.approx(num_bytes, rel=0.3)
