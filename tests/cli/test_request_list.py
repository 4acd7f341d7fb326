"""`pagemill requests`, at a broker with requests in every state."""

import asyncio
import json
import os
import secrets

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import Cancelled
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, RequestRecord
from shared.protocol.records import ChoiceDelta, OutputSummary, StageSpan, Usage
from shared.state import request_registry
from shared.state.request_list import ListedRequest, RequestLister, RequestTable
from shared.state.token_log import LogWriter, end_request
from tests.cli.test_request_commands import run
from tests.cluster.conftest import FORKED_PAGEMILL, ROOT

RUN = secrets.token_hex(4)
MODEL = f"model/{RUN}"


async def attempt(
    bus: Bus, request_id: str, stage: str, outcome: str = "open", model: str = ""
) -> None:
    began_ms = bus.now_ms() - 5000
    record = AttemptRecord(stage, f"{stage}-1", 1, began_ms, 0, outcome, model)  # type: ignore[arg-type]
    await bus.publish_without_id(subjects.attempts(request_id), to_json(record))


async def task(bus: Bus, request_id: str, stage: str) -> None:
    await bus.publish_without_id(subjects.stage(stage, MODEL, "interactive", request_id), b"x")


async def registered(bus: Bus, request_id: str, **options: int) -> None:
    now_s = int(bus.now_ms() / 1000)
    record = RequestRecord("chat", MODEL, "", now_s, False, dict(options), timeout_s=60.0)
    await request_registry.register(bus, request_id, record, "gateway-1:1")


async def finish(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens([ChoiceDelta(0, 0, [1, 2], "ab")])
    await log.tokens([ChoiceDelta(0, 2, [3], "c", "stop")])
    span = StageSpan("engine", "engine-1", 1, bus.now_ms() - 9000, bus.now_ms())
    await log.finish(OutputSummary(usage=Usage(7, 3), path=[span]), {})


@pytest.fixture
async def filled(broker: EmbeddedServer, bus: Bus) -> Bus:
    """A broker with one request in each state."""
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    if await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens(f"done-{RUN}")) is None:
        await attempt(bus, f"done-{RUN}", "engine")
        await finish(bus, f"done-{RUN}")
        await registered(bus, f"done-{RUN}")
        await attempt(bus, f"cancelled-{RUN}", "engine")
        await end_request(bus, f"cancelled-{RUN}", 1, Cancelled("by its client"), [])
        await task(bus, f"queued-{RUN}", "renderer")
        await task(bus, f"running-{RUN}", "engine")
        await attempt(bus, f"running-{RUN}", "engine")
        log = await LogWriter.open(bus, f"running-{RUN}", attempt=1)
        await log.tokens([ChoiceDelta(0, 0, [1, 2, 3, 4], "abcd")])
        await task(bus, f"again-{RUN}", "engine")
        await attempt(bus, f"again-{RUN}", "engine", "requeued")
        await registered(bus, f"waiting-{RUN}")
        await registered(bus, f"two-{RUN}", parts=2)
        await finish(bus, f"two-{RUN}~1")
        await attempt(bus, f"item_{RUN}", "encoder")
        await attempt(bus, names.job_id("response", f"resp-{RUN}", ""), "agent")
        await attempt(bus, names.job_id("batch", f"batch-{RUN}", "acme"), "batcher")
        await attempt(bus, f"direct-{RUN}", "coordinator")
        await attempt(bus, f"direct-{RUN}", "engine", model=MODEL)
        await end_request(bus, f"direct-{RUN}", 1, Cancelled("by its client"), [])
    return bus


async def listed(bus: Bus) -> dict[str, ListedRequest]:
    rows = (await RequestLister(bus).update()).requests
    return {row.request_id: row for row in rows}


async def test_each_state_is_reported_with_its_details(filled: Bus) -> None:
    rows = await listed(filled)
    states = {name: rows[f"{name}-{RUN}"].state for name in ("done", "cancelled", "queued")}
    assert states == {"done": "finished", "cancelled": "failed", "queued": "queued"}
    assert rows[f"running-{RUN}"].state == "running"
    assert rows[f"again-{RUN}"].state == "queued"
    assert rows[f"waiting-{RUN}"].state == "queued"
    done = rows[f"done-{RUN}"]
    assert (done.model, done.prompt_tokens, done.completion_tokens) == (MODEL, 7, 3)
    assert done.end == "stop"
    assert done.age_s is not None
    assert done.age_s >= 8
    cancelled = rows[f"cancelled-{RUN}"]
    assert (cancelled.end, cancelled.model) == ("cancelled", None)
    direct = rows[f"direct-{RUN}"]
    assert (direct.end, direct.model) == ("cancelled", MODEL)
    running = rows[f"running-{RUN}"]
    assert (running.stage, running.model, running.completion_tokens) == ("engine", MODEL, 4)
    assert rows[f"queued-{RUN}"].age_s is None


async def test_parts_stand_for_their_request_and_other_jobs_are_none(filled: Bus) -> None:
    rows = await listed(filled)
    assert f"two-{RUN}" not in rows
    assert rows[f"two-{RUN}~1"].model == MODEL
    assert not {f"item_{RUN}", f"resp-{RUN}", f"batch-{RUN}"} & {
        name.partition("@")[0] for name in rows
    }
    assert not [name for name in rows if name.startswith(("response:", "batch:"))]


async def test_requests_of_tenants_are_listed_with_their_tokens(filled: Bus) -> None:
    request_id = f"done-{RUN}@acme"
    await finish(filled, request_id)
    log = await LogWriter.open(filled, request_id, 1, "audio")
    await log.end(OutputSummary())
    rows = await listed(filled)
    assert (rows[request_id].prompt_tokens, rows[request_id].completion_tokens) == (7, 3)
    assert rows[request_id].end == "stop"
    assert "audio@acme" not in rows


async def test_requests_older_than_the_window_are_not_listed_and_this_is_said(filled: Bus) -> None:
    await attempt(filled, f"last-{RUN}", "engine")
    listing = await RequestLister(filled, window=1).update()
    assert listing.is_cut
    assert f"cancelled-{RUN}" not in {row.request_id for row in listing.requests}
    assert f"running-{RUN}" in {row.request_id for row in listing.requests}


def test_a_table_is_cut_to_the_newest() -> None:
    table = RequestTable()
    for i in range(10):
        trace = table.add_name(f"pm.tokens.r-{i}")
        assert trace is not None
        trace.see(1000.0 * i)
    assert table.cut(3, 20_000.0)
    assert [row.request_id for row in table.rows(20_000.0)] == ["r-9", "r-8", "r-7"]
    assert not table.cut(3, 20_000.0)


async def test_the_command_filters_and_limits(broker: EmbeddedServer, filled: Bus) -> None:
    code, out, _ = await run(broker, "requests", "--model", MODEL, "--state", "finished", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {row["request_id"] for row in rows} == {f"done-{RUN}", f"two-{RUN}~1"}
    _, out, err = await run(broker, "requests", "--model", MODEL, "--limit", "1")
    assert len(out.splitlines()) == 2
    assert "more match: --limit shows them" in err
    code, out, _ = await run(broker, "requests", f"done-{RUN}")
    assert (code, out.split()[:2]) == (0, ["state", "finished"])
    code, _, err = await run(broker, "requests", "--model", "nosuch")
    assert (code, "no requests" in err) == (0, True)


async def test_the_command_follows_changes(broker: EmbeddedServer, filled: Bus) -> None:
    process = await asyncio.create_subprocess_exec(
        *FORKED_PAGEMILL,
        "requests",
        "--follow",
        "--json",
        "--nats",
        broker.url,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None

    async def until(request_id: str, state: str) -> None:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            while True:
                row = json.loads(await process.stdout.readline())
                if (row["request_id"], row["state"]) == (request_id, state):
                    return

    try:
        await until(f"running-{RUN}", "running")
        await task(filled, f"new-{RUN}", "engine")
        await until(f"new-{RUN}", "queued")
        await finish(filled, f"new-{RUN}")
        await until(f"new-{RUN}", "finished")
    finally:
        process.terminate()
    assert await process.wait() == 0
