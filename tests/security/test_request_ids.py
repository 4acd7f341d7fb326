"""Request ids in subjects: what the clients of two tenants get with a stock library and a key."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.errors import Cancelled
from shared.protocol import names, subjects
from shared.protocol.batch_log import BatchBegun
from shared.protocol.encoding import to_json
from shared.protocol.permissions import OPERATOR
from shared.stage.runtime import Context
from shared.state import dead_letters
from shared.state.token_log import end_request
from tests.security.test_bus import Site
from tests.support.broker import create_tenant_queues, running_broker
from tests.support.waiting import until
from workers.coordinator import worker as coordinator
from workers.keyring import Keyring

BODY = json.dumps({"model": "demo", "prompt": "a"}).encode()
CONFIG = Config({model: ModelConfig("nowhere") for model in ("demo", "other")})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    keyring = Keyring(folder / "keys")
    keyring.complete(["a", "b"])
    with running_broker(folder / "nats", accounts_file=keyring.accounts_file) as server:
        yield Site(server, keyring)


@pytest.fixture
async def connections(site: Site) -> AsyncIterator[list[Bus]]:
    """The connections of the operator and of a coordinator, which runs."""
    buses = [await Bus.connect(site.login(name), "test") for name in (OPERATOR, "coordinator")]
    for bus in buses:
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await create_tenant_queues(buses[0])
    context = Context("coordinator", "c-1", None, CONFIG, buses[1], structlog.get_logger())
    serving = asyncio.create_task(coordinator.main(context))
    yield buses
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for bus in buses:
        await bus.close()


@pytest.fixture
def operator(connections: list[Bus]) -> Bus:
    return connections[0]


@dataclass
class Tenant:
    """A client with the key of a tenant."""

    nc: Client
    name: str

    async def publish(self, request_id: str, model: str = "demo") -> Any:
        return await self._store(f"pm.request.{model}.{request_id}", BODY)

    async def cancel(self, request_id: str) -> Any:
        return await self._store(f"pm.cancel.{request_id}", b"")

    async def _store(self, subject: str, data: bytes) -> Any:
        """Publish with a message id, which is the same for all messages with this subject."""
        headers = {"Nats-Msg-Id": subject}
        return await self.nc.jetstream().publish(subject, data, headers=headers)

    async def log(self, request_id: str) -> Subscription:
        log = await self.nc.subscribe(f"pm.tokens.{request_id}")
        await self.nc.flush()
        return log


@pytest.fixture
async def tenants(site: Site, operator: Bus) -> AsyncIterator[list[Tenant]]:
    """Clients of the tenants `a` and `b`."""
    clients = [Tenant((await site.attacker(name)).nc, name) for name in ("a", "b")]
    yield clients
    for client in clients:
        await client.nc.close()


@pytest.fixture
def name() -> str:
    return f"order-{secrets.token_hex(4)}"


async def until_admitted(bus: Bus, request_id: str) -> None:
    await until(lambda: bus.has_messages(subjects.STAGES_STREAM, subjects.stages_of(request_id)))


async def end(bus: Bus, request_id: str) -> None:
    """End a request, and wait until it is no longer queued."""
    await end_request(bus, request_id, 1, Cancelled("for the test"), [])
    async for queued in request_queue.queued_requests(bus):
        if queued.request_id == request_id:
            await bus.delete(*queued.place)


async def error_in(log: Subscription) -> dict[str, Any]:
    record = json.loads((await log.next_msg(60)).data)
    assert record["type"] == "error"
    return record["error"]  # type: ignore[no-any-return]


async def test_two_tenants_use_one_id(operator: Bus, tenants: list[Tenant], name: str) -> None:
    for tenant in tenants:
        assert not (await tenant.publish(name)).duplicate
    for tenant in tenants:
        await until_admitted(operator, f"{name}@{tenant.name}")
    logs = [await tenant.log(name) for tenant in tenants]
    await end(operator, f"{name}@a")
    assert (await error_in(logs[0]))["code"] == "cancelled"
    await tenants[1].nc.flush()
    assert not logs[1].pending_msgs


async def test_no_message_ids_of_trusted_publishers_are_compared(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    """Gateways share the queue of requests, so an id of one would be an id of all."""
    for tenant in tenants:
        subject = subjects.request("demo", f"{name}@{tenant.name}")
        headers = {"Nats-Msg-Id": name}
        stored = await operator.connection.js.publish(subject, BODY, headers=headers)
        assert not stored.duplicate
        await until_admitted(operator, f"{name}@{tenant.name}")


@pytest.mark.parametrize(
    "subject", ["pm.request.demo", "pm.request.demo.a.b", "pm.request.@b.demo.a"]
)
async def test_a_request_without_its_id_is_refused_at_its_publish(
    site: Site, operator: Bus, subject: str
) -> None:
    tenant = await site.attacker("a")
    await tenant.nc.publish(subject, BODY)
    assert await tenant.is_refused()
    await tenant.nc.close()
    if subject == "pm.request.demo":
        with pytest.raises(NoStreamResponseError):
            await operator.connection.js.publish(subject, BODY)


@pytest.mark.parametrize("kind", ["request.demo", "cancel"])
@pytest.mark.parametrize("bad", ["ü", "a=b", "a" * 129, "17@mail", "x@b", "item_x"])
async def test_an_invalid_id_is_answered(tenants: list[Tenant], kind: str, bad: str) -> None:
    bad = f"{bad}{kind[0]}"
    log = await tenants[0].log(bad)

    async def is_stored() -> bool:
        with contextlib.suppress(ServiceUnavailableError):  # The first one is still queued.
            return bool(await tenants[0].nc.jetstream().publish(f"pm.{kind}.{bad}", BODY))
        return False

    for _ in range(2):
        await until(is_stored)
        error = await error_in(log)
        assert (error["code"], error["field"]) == ("invalid_request", "request_id")
        assert "must be 1 to 128 letters" in error["message"]


@pytest.mark.parametrize("kind", ["request.demo", "cancel"])
@pytest.mark.parametrize(
    ("publisher", "foreign"), [("a", "*"), ("gateway", "item_x"), ("gateway", "x@b")]
)
async def test_an_id_of_another_log_ends_no_request(
    site: Site, operator: Bus, publisher: str, kind: str, foreign: str
) -> None:
    """It becomes a dead letter."""
    before, _ = await operator.figures.size(subjects.DEAD_STREAM)
    client = await site.attacker(publisher)
    await client.nc.jetstream().publish(f"pm.{kind}.{foreign}", BODY)
    await client.nc.close()

    async def is_dead() -> bool:
        return (await operator.figures.size(subjects.DEAD_STREAM))[0] > before

    await until(is_dead)
    ((key, letter_name, letter),) = [each async for each in dead_letters.read_newest(operator, 1)]
    assert (letter.error.code, letter.request_id) == ("undecodable_message", None)
    assert (await dead_letters.find(operator, letter_name)).key == key


async def test_an_id_in_flight_is_refused_and_stays_in_flight(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    await tenants[0].publish(name)
    await until_admitted(operator, f"{name}@a")
    with pytest.raises(ServiceUnavailableError) as refused:
        await tenants[0].publish(name)
    assert refused.value.err_code == 10077
    assert refused.value.description == "maximum messages per subject exceeded"
    queued = [request.request_id async for request in request_queue.queued_requests(operator)]
    assert queued.count(f"{name}@a") == 1


async def test_an_id_in_flight_names_no_request_for_another_model(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    await tenants[0].publish(name)
    await until_admitted(operator, f"{name}@a")
    await tenants[0].publish(name, "other")

    async def is_dropped() -> bool:
        queued = [request async for request in request_queue.queued_requests(operator)]
        own = [r.subject for r in queued if r.request_id == f"{name}@a"]
        return [subjects.model_of_request(subject) for subject in own] == ["demo"]

    await until(is_dropped)


async def test_an_id_that_has_ended_sends_its_end_again(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    await tenants[0].publish(name)
    await until_admitted(operator, f"{name}@a")
    await end(operator, f"{name}@a")
    log = await tenants[0].log(name)
    await tenants[0].publish(name)
    assert (await error_in(log))["message"] == "for the test"
    await tenants[0].cancel(name)
    assert (await error_in(log))["message"] == "for the test"
    stored = await operator.read(subjects.TOKENS_STREAM, subjects.tokens(f"{name}@a"))
    assert len(stored) == 1


async def test_a_cancellation_before_its_request_is_answered_twice(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    log = await tenants[0].log(name)
    await tenants[0].cancel(name)
    assert (await error_in(log))["code"] == "cancelled"
    await tenants[0].publish(name)
    assert (await error_in(log))["code"] == "cancelled"


async def test_no_batch_is_stored_among_input_files(operator: Bus, tenants: list[Tenant]) -> None:
    before, _ = await operator.figures.size(subjects.DEAD_STREAM)
    await tenants[0].nc.jetstream().publish("pm.batch.file", b"{}")

    async def has_ended() -> bool:
        files = subjects.stored_batch(subjects.batch_file("a", "*"))
        assert not await operator.has_messages(subjects.BATCHES_STREAM, files)
        return (await operator.figures.size(subjects.DEAD_STREAM))[0] > before

    await until(has_ended)


async def test_an_unread_batch_with_the_id_of_a_request_leaves_its_records_alone(
    operator: Bus, tenants: list[Tenant], name: str
) -> None:
    begun = BatchBegun(name, "a", "", "", 0, "", 0, 2**32)
    await operator.publish_without_id(subjects.batch_begun("a", name), to_json(begun))
    await operator.publish_without_id(subjects.batch_log("a", name), b"of a newer version")
    await tenants[0].nc.jetstream().publish(f"pm.batch.{name}", b"{}")
    attempts = subjects.attempts(names.job_id("batch", name, "a"))
    await until(lambda: operator.has_messages(subjects.ATTEMPTS_STREAM, attempts))
    assert await coordinator.why_unread(operator, f"{name}@a") is None
    log = subjects.stored_batch(subjects.batch_log("a", name))
    await operator.purge(subjects.BATCHES_STREAM, log)


ODD_NAMES = {
    "not UTF-8": b"\xff",
    "a form feed": b"a\x0cb",
    "a form feed and a number": b"a\x0c7",
    "a zero": b"a\0b",
    "very long": b"a" * 4050,
}
ODD_HEADERS = {
    "a description that is not UTF-8": b"NATS/1.0 503 a\xff\r\n\r\n",
    "a status that is not UTF-8": b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    "a name that is not UTF-8": b"NATS/1.0\r\n\xff: a\r\n\r\n",
    "only a version": b"NATS/1.0",
    "one byte": b"a",
}
KINDS = (b"pm.request.demo.", b"pm.cancel.", b"pm.read.")


async def check_coordinator(
    connections: list[Bus], client: Client, command: bytes, described: str
) -> None:
    """Send a command three times, and then a request, which the coordinator must admit.

    A message that ends the coordinator's connection would be delivered again and again.
    """
    for _ in range(3):
        await client._send_command(command)
    await client.flush()
    sign = f"sign-{secrets.token_hex(4)}"
    await client.jetstream().publish(f"pm.request.demo.{sign}", BODY)
    await until_admitted(connections[0], f"{sign}@a")
    assert connections[1].connection.nc.stats["reconnects"] == 0, described


@pytest.mark.parametrize("kind", KINDS)
async def test_no_name_in_a_subject_ends_the_connection_of_a_coordinator(
    connections: list[Bus], tenants: list[Tenant], kind: bytes
) -> None:
    for described, token in ODD_NAMES.items():
        command = b"PUB %b%b %d\r\n%b\r\n" % (kind, token, len(BODY), BODY)
        await check_coordinator(connections, tenants[0].nc, command, described)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_header_ends_the_connection_of_a_coordinator(
    connections: list[Bus], tenants: list[Tenant], kind: bytes, name: str
) -> None:
    for described, headers in ODD_HEADERS.items():
        sizes = len(headers), len(headers) + len(BODY)
        command = b"HPUB %b%b %d %d\r\n%b%b\r\n" % (kind, name.encode(), *sizes, headers, BODY)
        await check_coordinator(connections, tenants[0].nc, command, described)
