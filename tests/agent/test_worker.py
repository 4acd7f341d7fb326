"""One response in an agent within this process: what is deleted, late, or cannot go on, ends."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.config.parsing import parse_config
from shared.errors import Overloaded, PagemillError, TokenRateExceeded, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.records import error_info
from shared.protocol.renderer_rpc import ErrorReply, Tokenized
from shared.protocol.steps import (
    ApprovedCall,
    Asked,
    Begun,
    Choice,
    Ended,
    ResponseTask,
    Result,
    ServerUse,
    Step,
    ToolRef,
)
from shared.responses.tools import schema_digest
from shared.stage.runtime import Context
from shared.state import dead_letters, step_log
from shared.state.step_log import StepLog, open_log
from tests.agent.test_mcp_client import (
    BUSY,
    HEADS,
    LEGACY_SCRIPT,
    STEPS,
    scripted,
    server_of,
    stuck_at,
)
from workers.agent import worker
from workers.agent.mcp_client import McpClient
from workers.agent.run import ResponseRun
from workers.agent.worker import Agent

BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi")], {})


def context_of(bus: Bus, timeout_s: float = 600.0, **agent: Any) -> Context:
    tree = {"models": {"m": {"path": "m"}}, "agent": agent | {"mcp_networks": ["127.0.0.1/32"]}}
    delivery = {"max_deliver": 1, "default_timeout_s": timeout_s}
    config = parse_config(json.dumps(tree | {"delivery": delivery}), {}, "test")
    return Context(
        "agent", f"agent-{secrets.token_hex(4)}", None, config, bus, structlog.get_logger()
    )


async def begin(bus: Bus, begun: Begun = BEGUN) -> StepLog:
    log = StepLog(bus, "", f"resp_{secrets.token_hex(8)}")
    await log.append(begun)
    return log


async def carry_out(context: Context, log: StepLog) -> bool:
    client = McpClient(context.config.agent)
    task = ResponseTask(log.response_id, log.tenant)
    try:
        async with asyncio.timeout(30):
            run = ResponseRun(context, task, client, asyncio.Semaphore(1))
            return await run.carry_out()
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("begun", "code"),
    [
        (replace(BEGUN, ancestors=["gone"], servers=[ServerUse("calc")]), "not_found"),
        (replace(BEGUN, ancestors=["gone"]), "not_found"),
        (replace(BEGUN, deadline_s=2), "deadline_exceeded"),
    ],
)
async def test_what_cannot_go_on_ends_as_failed(bus: Bus, begun: Begun, code: str) -> None:
    log = await begin(bus, begun)
    assert await carry_out(context_of(bus), log)
    ended = (await open_log(bus, "", log.response_id)).state.ended
    assert ended is not None
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", code)


async def test_a_log_that_is_deleted_meanwhile_is_left(bus: Bus) -> None:
    asked, deleted = asyncio.Event(), asyncio.Event()

    async def answer(sent: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        asked.set()
        await deleted.wait()
        return 200, {"tools": []}

    async with server_of(answer) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")]))
        running = asyncio.create_task(
            carry_out(context_of(bus, servers={"calc": {"url": url}}), log)
        )
        await asked.wait()
        await log.delete()
        deleted.set()
        assert await running
    assert await log.is_gone()


async def test_a_response_that_comes_twice_to_a_process_is_carried_out_once(bus: Bus) -> None:
    called, answered = asyncio.Event(), asyncio.Event()
    async with server_of(adding(called, answered)) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        digest = schema_digest(ListedTool("add", {}))
        approved = [ApprovedCall("mcpr_1", "calc", "add", "{}", digest)]
        servers = [ServerUse("calc")]
        log = await begin(bus, replace(BEGUN, servers=servers, approved=approved))
        agent = Agent(context_of(bus, servers={"calc": {"url": url}}))
        handling = []
        consumer = await consume_alone(bus)
        for _ in range(2):
            task = to_json(ResponseTask(log.response_id, ""))
            await bus.publish_without_id(subjects.response("m"), task)
            handling.append(asyncio.create_task(agent._handle(await consumer.next())))
            await called.wait()
        async with asyncio.timeout(30):
            while True:  # Until the second one waits for the first.
                if agent._locks[f" {log.response_id}"]._waiters:
                    break
                await asyncio.sleep(0)
        answered.set()
        result = await first_result(log)
        for one in handling:
            one.cancel()
        await asyncio.gather(*handling, return_exceptions=True)
        await agent._client.close()
    assert result.outcome == "result"


async def test_a_call_goes_on_while_the_broker_does_not_answer(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been sent: to break it off would leave its outcome unknown."""
    called, answered, num_failed = asyncio.Event(), asyncio.Event(), 0
    refresh = StepLog.refresh

    async def refuse(log: StepLog, max_bytes: int | None = None) -> list[Step]:
        nonlocal num_failed
        if not called.is_set() or answered.is_set():
            return await refresh(log, max_bytes)
        num_failed += 1
        if num_failed == 3:
            answered.set()
        raise Unavailable("the broker did not answer")

    monkeypatch.setattr(StepLog, "refresh", refuse)
    monkeypatch.setattr(step_log, "SILENCE_S", 0.1)
    monkeypatch.setattr(step_log, "MAX_SILENCE_S", 0.1)
    async with server_of(adding(called, answered)) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        approved = [
            ApprovedCall("mcpr_1", "calc", "add", "{}", schema_digest(ListedTool("add", {})))
        ]
        log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")], approved=approved))
        context = context_of(bus, servers={"calc": {"url": url}})
        running = asyncio.create_task(carry_out(context, log))
        await answered.wait()
        result = await first_result(log)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert result.outcome == "result"


def adding(
    called: asyncio.Event, answered: asyncio.Event
) -> Callable[[dict[str, Any], dict[str, str]], Awaitable[tuple[int, Any]]]:
    """Return the answers of a server with one tool, whose calls wait until they may be answered."""

    async def answer(sent: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        if sent["method"] == "tools/list":
            return 200, {"tools": [{"name": "add", "inputSchema": {}}]}
        if sent["method"] == "tools/call":
            called.set()
            await answered.wait()
        return 200, {"content": []}

    return answer


async def first_result(log: StepLog) -> Result:
    async for step in log.follow():
        if isinstance(step, Result):
            return step
    raise AssertionError("there is no result")


async def consume_alone(bus: Bus) -> Consumer:
    """The queue of responses, without those that other tests have left."""
    await bus.purge(subjects.RESPONSES_STREAM, subjects.RESPONSES_FILTER)
    queue = subjects.RESPONSES_STREAM, subjects.RESPONSES_CONSUMER
    return await bus.queues.consume(*queue, subjects.RESPONSES_FILTER, 4, 5.0)


async def test_a_log_that_nobody_can_read_is_a_dead_letter(bus: Bus) -> None:
    log = await begin(bus)
    result = b'{"type":"result","index":1,"turn":7,"call":0,"outcome":"failed"}'
    await bus.publish_without_id(subjects.step("", log.response_id), result)
    consumer = await consume_alone(bus)
    task = to_json(ResponseTask(log.response_id, ""))
    await bus.publish(subjects.response("m"), task, log.response_id)
    await Agent(context_of(bus))._handle(await consumer.next())
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 0
    letter = await dead_letters.find(bus, log.response_id)
    assert (letter.role, letter.error.code) == ("agent", "undecodable_message")


async def handle(agent: Agent, bus: Bus, log: StepLog) -> None:
    """Have an agent handle a response that it gets from the queue."""
    consumer = await consume_alone(bus)
    task = to_json(ResponseTask(log.response_id, ""))
    await bus.publish(subjects.response("m"), task, log.response_id)
    await agent._handle(await consumer.next())


async def ended_of(bus: Bus, log: StepLog) -> Ended:
    ended = (await open_log(bus, "", log.response_id)).state.ended
    assert ended is not None
    return ended


@dataclass
class Renderer:
    """A renderer that replies with these errors, each once, and then with few tokens."""

    errors: list[PagemillError] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def tokenize(self, _: bytes) -> bytes:
        self.asked.set()
        if self.errors:
            return to_json(ErrorReply(error_info(self.errors.pop(0))))
        return to_json(Tokenized(1, 100, [1]))


@pytest.fixture
async def renderer(bus: Bus) -> Renderer:
    made = Renderer()
    await bus.add_responder(subjects.renderer("tokenize", "m"), made.tokenize)
    return made


TRUNCATED = replace(BEGUN, truncate=True)


async def test_an_overloaded_renderer_is_asked_again(
    bus: Bus, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    renderer.errors += [Overloaded("too many requests"), Unavailable("away"), Overloaded("again")]
    log = await begin(bus, TRUNCATED)
    handling = asyncio.create_task(handle(Agent(context_of(bus)), bus, log))
    async for step in log.follow():
        if not isinstance(step, Begun):
            assert isinstance(step, Asked)
            break
    assert renderer.errors == []
    await log.delete()
    handling.cancel()
    await asyncio.gather(handling, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "timeout_s"),
    [
        (Overloaded("full"), 0.5),
        (Unavailable("away"), 0.5),
        (TokenRateExceeded("much", 7.0), 600.0),
    ],
)
async def test_an_error_of_a_renderer_is_stored_as_it_is(
    bus: Bus, renderer: Renderer, error: PagemillError, timeout_s: float
) -> None:
    renderer.errors += [error] * 100
    log = await begin(bus, TRUNCATED)
    await handle(Agent(context_of(bus, timeout_s)), bus, log)
    assert (await ended_of(bus, log)).error == error_info(error)
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 0


async def test_a_pause_ends_with_the_drain_of_the_agent(bus: Bus, renderer: Renderer) -> None:
    renderer.errors += [Overloaded("full")] * 100
    log, context = await begin(bus, TRUNCATED), context_of(bus)
    handling = asyncio.create_task(handle(Agent(context), bus, log))
    await renderer.asked.wait()
    context.shutdown.begin()
    await handling
    # The next agent gets it.
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 1
    assert (await open_log(bus, "", log.response_id)).state.ended is None


async def test_required_tools_of_a_busy_server_are_an_error_that_passes(bus: Bus) -> None:
    script = LEGACY_SCRIPT | {"tools/list": [BUSY]}
    async with server_of(scripted(script, [])) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        choice = Choice("required", [ToolRef(label="calc")])
        log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")], choice=choice))
        assert await carry_out(context_of(bus, servers={"calc": {"url": url}}), log)
    error = (await ended_of(bus, log)).error
    assert error is not None
    assert (error.code, error.fault, error.retryable) == ("tools_unavailable", "server", True)
    assert error.message == "tool_choice needs the tools of calc: the server answered 429"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stage", STEPS)
async def test_a_cancellation_reaches_a_response_whose_server_hangs(
    bus: Bus, stage: str, head: bytes
) -> None:
    reached = asyncio.Event()
    async with server_of(stuck_at(stage, head, reached)) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        digest = schema_digest(ListedTool("add", {}))
        approved = [ApprovedCall("mcpr_1", "calc", "add", "{}", digest)]
        log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")], approved=approved))
        context = context_of(bus, servers={"calc": {"url": url}})
        running = asyncio.create_task(carry_out(context, log))
        await reached.wait()
        canceller = await open_log(bus, "", log.response_id)
        await canceller.append(Ended(0, "cancelled", 2))
        assert await running
