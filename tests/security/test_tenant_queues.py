"""Queues of tenants: what one tenant with a stock library and a key does to the others."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError
from structlog.testing import capture_logs

from shared.bus import queues, request_queue
from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.errors import Cancelled, Unavailable
from shared.protocol import subjects
from shared.protocol.permissions import OPERATOR
from shared.protocol.requests import GenerateRequest, encode_request
from shared.stage.runtime import Context
from shared.state.token_log import end_request
from tests.security.test_bus import Attacker, Site
from tests.support.broker import create_tenant_queues, running_broker
from tests.support.waiting import until
from workers.coordinator import intake
from workers.coordinator import worker as coordinator
from workers.keyring import Keyring

BODY = json.dumps({"model": "demo", "prompt": "a"}).encode()
MAX_QUEUED = 60
"""Limit on the requests of each queue, also of the queue of trusted publishers."""
FLOOD = 10_000
NATS = NatsConfig(tenant_queued=MAX_QUEUED)
DELIVERY = DeliveryConfig(max_queued=MAX_QUEUED)
CONFIG = Config({"demo": ModelConfig("nowhere")}, nats=NATS, delivery=DELIVERY)
FULL = "maximum messages exceeded"


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    keyring = Keyring(folder / "keys")
    keyring.complete(["a", "b"])
    with running_broker(folder / "nats", accounts_file=keyring.accounts_file) as server:
        yield Site(server, keyring)


@pytest.fixture
async def operator(site: Site) -> AsyncIterator[Bus]:
    """The operator's connection to a broker with the queues of all tenants."""
    bus = await Bus.connect(site.login(OPERATOR), "test")
    await bus.streams.prepare(NATS, DELIVERY)
    await create_tenant_queues(bus)
    yield bus
    await bus.close()


@pytest.fixture
async def tenants(site: Site, operator: Bus) -> AsyncIterator[list[Attacker]]:
    clients = [await site.attacker(name) for name in ("a", "b")]
    yield clients
    for client in clients:
        await client.nc.close()


@contextlib.asynccontextmanager
async def coordinating(site: Site) -> AsyncIterator[None]:
    """Run a coordinator with its own key."""
    bus = await Bus.connect(site.login("coordinator"), "test")
    await bus.streams.prepare(NATS, DELIVERY)
    context = Context("coordinator", "c-1", None, CONFIG, bus, structlog.get_logger())
    serving = asyncio.create_task(coordinator.main(context))
    yield
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    await bus.close()


async def publish(
    client: Attacker, subject: str, data: bytes = BODY, headers: dict[str, str] | None = None
) -> Any:
    return await client.nc.jetstream().publish(subject, data, headers=headers)


async def count_refusals(
    client: Attacker, names: list[str], headers: dict[str, str] | None = None
) -> int:
    """Publish many messages at a time, and return how many the broker refused as too many."""
    refused = 0
    for first in range(0, len(names), 500):
        publishing = (publish(client, name, headers=headers) for name in names[first : first + 500])
        for outcome in await asyncio.gather(*publishing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, APIError)
                assert outcome.description == FULL
                refused += 1
    return refused


async def until_admitted(bus: Bus, request_id: str) -> None:
    await until(lambda: bus.has_messages(subjects.STAGES_STREAM, subjects.stages_of(request_id)))


@pytest.mark.parametrize("version", ["", "999"])
async def test_a_flood_of_one_tenant_is_refused_and_another_is_answered(
    site: Site, operator: Bus, tenants: list[Attacker], version: str
) -> None:
    a, b = tenants
    headers = {"Pagemill-Version": version} if version else {}
    async with coordinating(site):
        flood = [f"pm.request.demo.flood-{number}" for number in range(FLOOD)]
        assert await count_refusals(a, flood, headers) >= FLOOD - MAX_QUEUED
        log = await b.nc.subscribe("pm.tokens.order")
        await publish(b, "pm.request.demo.order")
        await until_admitted(operator, "order@b")
        await end_request(operator, "order@b", 1, Cancelled("for the test"), [])
        assert json.loads((await log.next_msg(60)).data)["error"]["code"] == "cancelled"
        data = encode_request(GenerateRequest("demo", prompt="a"))
        await operator.publish_without_id(subjects.request("demo", "over-http@b"), data)
        await until_admitted(operator, "over-http@b")


async def test_large_requests_of_one_tenant_fill_its_own_queue(
    operator: Bus, tenants: list[Attacker]
) -> None:
    a, b = tenants
    names = [f"pm.request.demo.large-{number}" for number in range(NATS.tenant_request_mib)]
    publishing = (publish(a, name, bytes(2**20)) for name in names)
    outcomes = await asyncio.gather(*publishing, return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [getattr(refusal, "description", "") for refusal in refusals] == [
        "maximum bytes exceeded"
    ]
    await publish(b, "pm.request.demo.large", bytes(2**20))


async def test_a_flood_of_cancellations_leaves_those_of_others(
    operator: Bus, tenants: list[Attacker]
) -> None:
    a, b = tenants
    flood = [f"pm.cancel.flood-{number}" for number in range(3 * MAX_QUEUED)]
    assert await count_refusals(a, flood) == MAX_QUEUED
    await publish(b, "pm.cancel.order", b"")
    with pytest.raises(APIError, match="message size exceeds maximum"):
        await publish(b, "pm.cancel.large", bytes(2**16))


async def test_acknowledgements_show_nothing_of_others(
    operator: Bus, tenants: list[Attacker]
) -> None:
    a, b = tenants
    for root in ("pm.request.demo", "pm.cancel"):
        before = await publish(a, f"{root}.r-1", b"")
        for number in range(5):
            await publish(b, f"{root}.r-{number}", b"")
        await operator.publish_without_id(
            subjects.request("demo", "r-9@a") if "request" in root else subjects.cancel("r-9@a"),
            b"",
        )
        after = await publish(a, f"{root}.r-2", b"")
        assert (after.stream, after.seq) == (before.stream, before.seq + 1)
        assert after.stream.endswith("_a")
        expected = {"Nats-Expected-Last-Sequence": str(after.seq)}
        await publish(a, f"{root}.r-3", b"", expected)


async def test_expectations_show_nothing_of_others(operator: Bus, tenants: list[Attacker]) -> None:
    a, b = tenants
    sent = await publish(b, "pm.request.demo.sent")
    root = f"pm.request.@b.{subjects.WITH_KEY}.demo"
    for subject in (f"{root}.sent", f"{root}.unsent"):
        assert [await outcome_of(a, subject, number) for number in (0, sent.seq)] == [0, 10071]


async def outcome_of(client: Attacker, subject: str, expected: int) -> int | None:
    """Publish with an expectation of another subject, and return the error code, or 0."""
    header = "Nats-Expected-Last-Subject-Sequence"
    headers = {header: str(expected), f"{header}-Subject": subject}
    try:
        await publish(client, f"pm.request.demo.guess-{secrets.token_hex(4)}", headers=headers)
    except APIError as error:
        return error.err_code
    return 0


async def test_a_backlog_of_one_tenant_delays_this_tenant(
    site: Site, operator: Bus, tenants: list[Attacker]
) -> None:
    a, b = tenants
    for number in range(MAX_QUEUED):
        await publish(a, f"pm.request.demo.backlog-{number}")
    await publish(b, "pm.request.demo.order")
    async with coordinating(site):
        await until_admitted(operator, "order@b")
        ids = [f"backlog-{number}@a" for number in range(MAX_QUEUED)]
        await asyncio.gather(*(until_admitted(operator, request_id) for request_id in ids))
        tasks = await operator.read(subjects.STAGES_STREAM, subjects.STAGES_FILTER)
    admitted = [subjects.last_token(task.subject) for task in tasks]
    assert admitted.index("order@b") < MAX_QUEUED / 2


async def test_an_id_that_comes_with_the_key_and_from_a_gateway_is_one_request(
    site: Site, operator: Bus, tenants: list[Attacker]
) -> None:
    data = encode_request(GenerateRequest("demo", prompt="a"))
    async with coordinating(site):
        await publish(tenants[0], "pm.request.demo.order")
        await until_admitted(operator, "order@a")
        await operator.publish_without_id(subjects.request("demo", "order@a"), data)

        async def is_one() -> bool:
            queued = [request async for request in request_queue.queued_requests(operator)]
            return [request.place.stream for request in queued] == ["REQUESTS_a"]

        await until(is_one)
        # The end of the request removes it from the queue that has it.
        await publish(tenants[0], "pm.cancel.order", b"")
        await until(lambda: is_empty(operator))


async def is_empty(bus: Bus) -> bool:
    return (await request_queue.size(bus))[0] == 0


async def test_a_tenant_that_gets_a_key_is_served_without_a_restart(
    site: Site, operator: Bus
) -> None:
    async with coordinating(site):
        site.keyring.add_tenant("c")
        site.server.reload()
        queues = {*subjects.queues_of_tenant("c")}

        async def has_queues() -> bool:
            with contextlib.suppress(Unavailable):  # The broker does not answer while it reloads.
                return queues <= {*await request_queue.streams_of_tenants(operator)}
            return False

        await until(has_queues)
        # The broker connects the subjects of a new account when it reloads once more.
        site.server.reload()
        c = await site.attacker("c")

        async def is_stored() -> bool:
            with contextlib.suppress(NoStreamResponseError):
                await publish(c, "pm.request.demo.order")
                return True
            return False

        await until(is_stored)
        await until_admitted(operator, "order@c")
        await publish(c, "pm.cancel.order", b"")
        await until(lambda: is_empty(operator))
        await c.nc.close()


async def test_the_queues_of_a_tenant_without_a_key_are_removed_when_they_are_empty(
    site: Site, operator: Bus, tenants: list[Attacker]
) -> None:
    await publish(tenants[0], "pm.request.demo.order")
    for name in ("a", "b"):
        site.keyring.remove_tenant(name)
    site.server.reload()

    async def has_no_tenants() -> bool:
        await operator.streams.find_tenants()
        return not operator.streams.queues_of_tenants

    await until(has_no_tenants)
    removed = await request_queue.remove_unused(operator)
    assert removed == ["CANCELS_a", "CANCELS_b", "REQUESTS_b"]
    (queued,) = [request async for request in request_queue.queued_requests(operator)]
    assert queued.request_id == "order@a"
    await operator.delete(*queued.place)
    assert await request_queue.remove_unused(operator) == ["REQUESTS_a"]
    assert await request_queue.remove_unused(operator) == []


async def block_queue(operator: Bus, tenant: str) -> None:
    """Add a consumer to a tenant's queue, so that the broker refuses the coordinators' consumer."""
    foreign = api.ConsumerConfig(durable_name="foreign", ack_policy=api.AckPolicy.EXPLICIT)
    await operator.connection.js.add_consumer(f"{subjects.REQUESTS_STREAM}_{tenant}", foreign)


async def test_trusted_publishers_do_not_wait_for_the_queues_of_tenants(
    site: Site, operator: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "START_S", 0.1)
    await block_queue(operator, "a")
    with capture_logs() as logs:
        async with coordinating(site):
            data = encode_request(GenerateRequest("demo", prompt="a"))
            await operator.publish_without_id(subjects.request("demo", "over-http@b"), data)
            await until_admitted(operator, "over-http@b")
    assert "tenant_queues_incomplete" not in {log["event"] for log in logs}


async def test_a_queue_that_cannot_be_served_leaves_the_queues_of_others(
    site: Site, operator: Bus, tenants: list[Attacker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CREATED_AT_ONCE", 1)
    monkeypatch.setattr(queues, "BROKER_DEADLINE_S", 0.5)
    await block_queue(operator, "a")
    async with coordinating(site):
        await publish(tenants[1], "pm.request.demo.order")
        await until_admitted(operator, "order@b")
