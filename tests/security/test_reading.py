"""Stored answers, states and files over NATS, for a stock client with a tenant's key."""

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client

from shared.bus.bus import HEADER_BYTES, Bus
from shared.bus.login import Login, seed_file
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.permissions import OPERATOR
from shared.protocol.reading import MAX_PAGE_BYTES, LogPage
from shared.protocol.records import ChoiceDelta, OutputSummary, Usage
from shared.state import log_pages, media_store, request_status
from shared.state.token_log import LogWriter
from tests.support.broker import create_tenant_queues, running_broker
from tests.support.waiting import until
from workers.coordinator import precedence, reading
from workers.coordinator.precedence import Precedence
from workers.coordinator.reading import Reading
from workers.keyring import Keyring

MAX_READS = 20


@dataclass
class Site:
    """A broker whose clients need keys, with the reading part of a coordinator."""

    operator: Bus
    reading: Reading
    precedence: Precedence
    a: Client
    b: Client

    async def write(self, request_id: str, *texts: str, ends: bool = True) -> LogWriter:
        log = await LogWriter.open(self.operator, request_id, 1)
        for text in texts:
            await log.tokens([ChoiceDelta(index=0, position=0, token_ids=[1], text=text)])
        if ends:
            await log.finish(OutputSummary(Usage(1, len(texts)), 1), {})
        return log

    async def store(self, data: bytes, tenant: str = "a") -> str:
        """Store a file, and return its name."""
        name = await media_store.hash_media(data)
        await media_store.store(self.operator, name, data, tenant)
        return name


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    keyring = Keyring(tmp_path / "keys")
    keyring.complete(["a", "b"])
    with running_broker(tmp_path / "nats", accounts_file=keyring.accounts_file) as server:
        operator, coordinator = [
            await Bus.connect(Login(server.url, name, seed_file(keyring.folder, name)), "test")
            for name in (OPERATOR, "coordinator")
        ]
        await operator.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        await create_tenant_queues(operator)
        clients = [
            await nats.connect(server.url, nkeys_seed=str(keyring.file_of_tenant(name)))
            for name in ("a", "b")
        ]
        order = Precedence()
        answering = Reading(coordinator, MAX_READS, order)
        await answering.start()
        yield Site(operator, answering, order, *clients)
        await answering.stop(10)
        for client in clients:
            await client.close()
        for bus in (operator, coordinator):
            await bus.close()


async def call(nc: Client, subject: str, body: dict[str, Any] | bytes = b"") -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads((await nc.request(subject, data, timeout=60)).data)


async def code_of(nc: Client, subject: str, body: dict[str, Any] | bytes = b"") -> str:
    reply = await call(nc, subject, body)
    assert reply["type"] == "error"
    return str(reply["error"]["code"])


@pytest.mark.parametrize("max_bytes", [1, 2**18])
async def test_pages_have_the_bytes_of_the_live_records(site: Site, max_bytes: int) -> None:
    live = await site.a.subscribe("pm.tokens.r")
    await site.a.flush()
    await site.write("r@a", *"hello")
    messages = [(await live.next_msg(60)).data for _ in range(6)]
    records, page = [], LogPage([], 0, ended=False)
    while not page.ended:
        query = json.dumps({"from": page.next, "max_bytes": max_bytes}).encode()
        reply = await site.a.request("pm.read.r", query, timeout=60)
        page = msgspec.json.decode(reply.data, type=LogPage)
        records += [bytes(record) for record in page.records]
        assert len(page.records) == (1 if max_bytes == 1 else 6)
    assert records == messages
    assert page.next == 6


async def test_pages_join_live_records(site: Site) -> None:
    log = await site.write("r@a", "0", "1", "2", ends=False)
    live = await site.a.subscribe("pm.tokens.r")
    page = await call(site.a, "pm.read.r")
    assert (page["next"], page["ended"]) == (3, False)
    await log.tokens([])
    await log.finish(OutputSummary(Usage(1, 4), 1), {})
    coming = [json.loads((await live.next_msg(60)).data) for _ in range(2)]
    assert [record["index"] for record in page["records"] + coming] == [0, 1, 2, 3, 4]
    rest = await call(site.a, "pm.read.r", {"from": page["next"]})
    assert (rest["records"], rest["ended"]) == (coming, True)


async def test_a_request_that_waits_has_an_empty_page(site: Site) -> None:
    await site.a.jetstream().publish("pm.request.demo.waits", b"{}")
    page = await call(site.a, "pm.read.waits")
    assert page == {"records": [], "next": 0, "ended": False}
    state = await call(site.a, "pm.state.waits")
    assert (state["state"], state["model"]) == ("queued", "demo")
    assert state["why"] == "no coordinator is alive"
    assert await code_of(site.b, "pm.read.waits") == "not_found"


async def test_another_output_has_a_separate_log(site: Site) -> None:
    sound = await LogWriter.open(site.operator, "r@a", 1, "audio")
    await sound.audio(0, b"\0\0" * 10, 24_000)
    await sound.end(OutputSummary())
    await site.write("r@a", "text")
    page = await call(site.a, "pm.read.r", {"output": "audio"})
    assert [record["type"] for record in page["records"]] == ["audio", "end"]
    assert page["ended"]
    for output in ("video", "ends"):
        refused = await call(site.a, "pm.read.r", {"output": output})
        assert (refused["error"]["code"], refused["error"]["field"]) == ("not_found", "output")


async def test_a_removed_record_is_a_typed_error(site: Site) -> None:
    await site.write("r@a", "0", "1")
    (first, *_) = await site.operator.read(subjects.TOKENS_STREAM, subjects.tokens("r@a"))
    await site.operator.delete(subjects.TOKENS_STREAM, first.sequence)
    refused = (await call(site.a, "pm.read.r"))["error"]
    assert (refused["code"], refused["field"]) == ("log_truncated", "from")
    assert "read from 1" in refused["message"]
    page = await call(site.a, "pm.read.r", {"from": 1})
    assert [record["index"] for record in page["records"]] == [1, 2]


async def test_a_page_fits_into_a_message_of_the_broker(site: Site) -> None:
    """The largest record that a log can have, and more records than a page may have."""
    limit = site.operator.max_payload - HEADER_BYTES
    overhead = len(b'{"type":"tokens","index":0,"attempt":1,"choices":[],"embedding":""}')
    log = await LogWriter.open(site.operator, "large@a", 1)
    await log.embedding("x" * (limit - overhead))
    page = await call(site.a, "pm.read.large", {"max_bytes": MAX_PAGE_BYTES})
    assert len(page["records"]) == 1
    await site.write("many@a", *["x" * 300_000] * 5)
    page = await call(site.a, "pm.read.many", {"max_bytes": MAX_PAGE_BYTES})
    assert (page["next"], page["ended"]) == (3, False)


async def test_the_state_is_the_one_that_where_shows(site: Site) -> None:
    await site.write("r@a", "text")
    status = await request_status.find(site.operator, "r@a")
    assert status.state == "finished"
    expected = json.loads(to_json(status)) | {"request_id": "r"}
    assert await call(site.a, "pm.state.r") == expected
    assert (await call(site.b, "pm.state.r"))["state"] == "unknown"


@pytest.mark.parametrize("max_bytes", [1000, 300_000, MAX_PAGE_BYTES])
async def test_a_file_is_read_in_pages(site: Site, max_bytes: int) -> None:
    data = secrets.token_bytes(20_000 if max_bytes == 1000 else 2 * media_store.CHUNK_BYTES + 77)
    name = await site.store(data)
    content, page = b"", {"next": 0, "ended": False}
    while not page["ended"]:
        page = await call(site.a, f"pm.file.{name}", {"from": page["next"], "max_bytes": max_bytes})
        part = base64.b64decode(page["data"])
        content += part
        assert 0 < len(part) <= max_bytes
        assert (page["next"], page["num_bytes"]) == (len(content), len(data))
    assert content == data
    end = await call(site.a, f"pm.file.{name}", {"from": len(data)})
    assert (end["data"], end["ended"]) == ("", True)
    after = await call(site.a, f"pm.file.{name}", {"from": len(data) + 1})
    assert after["error"]["field"] == "from"
    assert f"which has {len(data)} bytes" in after["error"]["message"]


async def test_an_empty_or_incomplete_file(site: Site) -> None:
    empty = await site.store(b"")
    page = await call(site.a, f"pm.file.{empty}")
    assert page == {"data": "", "next": 0, "num_bytes": 0, "ended": True}
    name = await site.store(secrets.token_bytes(2 * media_store.CHUNK_BYTES))
    chunk = subjects.media_chunk(media_store.storage_name(name, "a"), 1)
    await site.operator.purge(subjects.MEDIA_STREAM, chunk)
    body = {"from": media_store.CHUNK_BYTES - 1}
    assert await code_of(site.a, f"pm.file.{name}", body) == "media_not_found"


async def test_a_tenant_reads_its_own_answers_and_files_alone(site: Site) -> None:
    for tenant in ("a", "b"):
        await site.write(f"{tenant}-only@{tenant}", tenant)
        await site.write(f"same@{tenant}", tenant)
    await site.write("without-a-tenant", "x")
    own, other = [await site.store(secrets.token_bytes(100), tenant) for tenant in ("a", "b")]
    shared = await site.store(b"without a tenant", "")
    page = await call(site.a, "pm.read.same")
    assert page["records"][0]["choices"][0]["text"] == "a"
    for request_id in ("b-only", "without-a-tenant", "never-sent"):
        assert await code_of(site.a, f"pm.read.{request_id}") == "not_found"
    for request_id in ("same@b", "@b", "b-only@b", "item_x", "a" * 129):
        for kind in ("read", "state"):
            assert await code_of(site.a, f"pm.{kind}.{request_id}") == "invalid_request"
    assert (await call(site.a, f"pm.file.{own}"))["ended"]
    for name in (other, shared, hashlib.sha256(b"b:" + other.encode()).hexdigest()):
        assert await code_of(site.a, f"pm.file.{name}") == "media_not_found"
    for name in (f"{other}@b", own.upper(), own[1:], f"file-{own}"):
        assert await code_of(site.a, f"pm.file.{name}") == "invalid_request"
    # A header names no other tenant.
    query = await site.a.request(
        "pm.read.b-only", b"", timeout=60, headers={"Pagemill-Tenant": "b"}
    )
    assert json.loads(query.data)["error"]["code"] == "not_found"


@pytest.mark.parametrize("identity", ["gateway", "agent", OPERATOR])
async def test_trusted_clients_name_the_tenant(site: Site, identity: str, tmp_path: Path) -> None:
    await site.write("r@a", "text")
    name = await site.store(b"file")
    url = site.a.connected_url
    assert url is not None
    nc = await nats.connect(
        url.geturl(),
        nkeys_seed=str(seed_file(tmp_path / "keys", identity)),
        inbox_prefix=f"_INBOX.{identity}",
    )
    assert (await call(nc, "pm.read.r@a"))["ended"]
    state = await call(nc, "pm.state.r@a")
    assert (state["state"], state["request_id"]) == ("finished", "r@a")
    assert base64.b64decode((await call(nc, f"pm.file.{name}@a"))["data"]) == b"file"
    assert await code_of(nc, "pm.read.r") == "not_found"
    await nc.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"from": -1}', "from: must be at least 0"),
        (b'{"from": 9007199254740992}', "from: must be at most 9007199254740991"),
        (b'{"from": "0"}', "from: must be a whole number, not a text"),
        (b'{"from": 1e999}', "from: must be a number that 64 bits can hold"),
        (b'{"max_bytes": 0}', "max_bytes: must be at least 1"),
        (b'{"max_bytes": 1048577}', "max_bytes: must be at most 1048576"),
        (b'{"start": 1}', "start: unknown field"),
        (b'{"from": 1', "neither JSON nor msgpack"),
        (b"[" * 4000, "must have at most 64 levels of nesting"),
        (b"[]", "must be an object, not a list"),
        (b"\xff" * 100, "must be an object"),
        (b"\0", "neither JSON nor msgpack"),
        (b" " * 5000, "the request has 5000 bytes, the limit is 4096"),
    ],
)
async def test_a_malformed_read_is_refused_with_its_field(
    site: Site, body: bytes, message: str
) -> None:
    await site.write("r@a", "text")
    name = await site.store(b"file")
    for subject in ("pm.read.r", f"pm.file.{name}"):
        error = (await call(site.a, subject, body))["error"]
        assert error["code"] == "invalid_request"
        assert message in error["message"]
    assert (await call(site.a, "pm.read.r"))["ended"]


@pytest.mark.parametrize("output", ["", "a.b", "*", ">", "text\n", "x" * 129, "a b"])
async def test_an_output_is_one_name(site: Site, output: str) -> None:
    error = (await call(site.a, "pm.read.r", {"output": output}))["error"]
    assert (error["code"], error["field"]) == ("invalid_request", "output")


async def test_a_state_has_no_fields(site: Site) -> None:
    assert await code_of(site.a, "pm.state.r", b"{}") == "invalid_request"


async def test_a_tenant_has_a_limit_on_its_reads_in_flight(site: Site) -> None:
    await site.write("r@a", "text")
    await site.write("r@b", "text")
    with site.precedence.urgent():
        flood = [asyncio.create_task(call(site.a, "pm.read.r")) for _ in range(3 * MAX_READS)]
        assert (await call(site.b, "pm.read.r"))["ended"]
    replies = await asyncio.gather(*flood)
    errors = [reply["error"] for reply in replies if "error" in reply]
    assert 0 < len(errors) <= 2 * MAX_READS
    for error in errors:
        assert (error["code"], error["retryable"]) == ("overloaded", True)
        assert f"{MAX_READS} reads of this tenant" in error["message"]
        assert "delivery.tenant_reads" in error["message"]
    assert (await call(site.a, "pm.read.r"))["ended"]


async def test_reads_wait_while_a_request_is_admitted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precedence, "MAX_WAIT_S", 3600)
    await site.write("r@a", "text")
    with site.precedence.urgent():
        reads = [asyncio.create_task(call(site.a, f"pm.{kind}.r")) for kind in ("read", "state")]
        await until(lambda: site.reading._num_reads["a"] == 2)
        assert not any(read.done() for read in reads)
    assert (await reads[0])["ended"]
    assert (await reads[1])["state"] == "finished"


async def test_reads_of_one_tenant_leave_turns_to_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = asyncio.Event()

    async def wait_and_read(*arguments: Any) -> LogPage | None:
        await may_read.wait()
        return await log_pages.read_page(*arguments)

    monkeypatch.setattr(reading, "MAX_HELD", 8)
    monkeypatch.setattr(reading, "read_page", wait_and_read)
    for tenant in ("a", "b"):
        await site.write(f"r@{tenant}", "text")
    flood = [asyncio.create_task(call(site.a, "pm.read.r")) for _ in range(20)]
    while sum(task.done() for task in flood) < 12:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other = asyncio.create_task(call(site.b, "pm.read.r"))
    while sum(task.done() for task in flood) < 13:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    may_read.set()
    assert (await other)["ended"]
    replies = await asyncio.gather(*flood)
    errors = [reply["error"] for reply in replies if "error" in reply]
    assert [error["code"] for error in errors] == ["overloaded"] * 13
    assert all(error["retryable"] and error["retry_after_s"] for error in errors)
