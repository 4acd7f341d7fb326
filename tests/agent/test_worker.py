"""Responses that are deleted, late, or cannot continue end: an agent within this process."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.config.parsing import parse_config
from shared.errors import NotFound, Overloaded, PagemillError, Poisoned, Unavailable, WorkerFailure
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.messages import AttemptRecord, DeadLetter, decode_attempt, decode_dead_letter
from shared.protocol.records import error_info
from shared.protocol.renderer_rpc import ErrorReply, Tokenized
from shared.protocol.requests import GenerateRequest
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
from shared.state import dead_letters, request_status, step_log
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
from tests.cluster.conftest import ROOT
from workers.agent.mcp_client import McpClient
from workers.agent.run import ResponseRun
from workers.agent.worker import Agent

BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi")], {})


def context_of(bus: Bus, timeout_s: float = 600.0, max_deliver: int = 1, **agent: Any) -> Context:
    tree = {"models": {"m": {"path": "m"}}, "agent": agent | {"mcp_networks": ["127.0.0.1/32"]}}
    delivery = {"max_deliver": max_deliver, "default_timeout_s": timeout_s, "retry_delay_s": 0.01}
    config = parse_config(json.dumps(tree | {"delivery": delivery}), {}, "test")
    return Context(
        "agent", f"agent-{secrets.token_hex(4)}", None, config, bus, structlog.get_logger()
    )


async def begin(bus: Bus, begun: Begun = BEGUN) -> StepLog:
    log = StepLog(bus, begun.tenant, f"resp_{secrets.token_hex(8)}")
    await log.append(begun)
    return log


def job_of(log: StepLog) -> str:
    return names.job_id("response", log.response_id, log.tenant)


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
async def test_a_response_that_cannot_continue_ends_as_failed(
    bus: Bus, begun: Begun, code: str
) -> None:
    log = await begin(bus, begun)
    assert await carry_out(context_of(bus), log)
    ended = (await open_log(bus, "", log.response_id)).state.ended
    assert ended is not None
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", code)


async def test_a_log_that_is_deleted_meanwhile_is_left(bus: Bus) -> None:
    called, deleted = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        called.set()
        await deleted.wait()
        return 200, {"tools": []}

    async with server_of(answer) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")]))
        running = asyncio.create_task(
            carry_out(context_of(bus, servers={"calc": {"url": url}}), log)
        )
        await called.wait()
        await log.delete()
        deleted.set()
        assert await running
    assert await log.is_gone()


@pytest.fixture(autouse=True)
async def queue(bus: Bus) -> None:
    """Remove the responses that other tests have left."""
    await bus.purge(subjects.RESPONSES_STREAM, subjects.RESPONSES_FILTER)


@asynccontextmanager
async def serving(context: Context, *, drained: bool = True) -> AsyncIterator[None]:
    """Run an agent in this process. If it is not drained, it requeues what it has in flight."""
    running = asyncio.create_task(Agent(context).serve())
    try:
        yield
    finally:
        context.shutdown.begin()
        if not drained:
            context.shutdown.hurry.set()
        await running
        await context.close()


async def enqueue(bus: Bus, log: StepLog) -> None:
    task = to_json(ResponseTask(log.response_id, log.tenant))
    await bus.publish_without_id(subjects.response("m"), task)


async def handle(context: Context, log: StepLog) -> None:
    """Have an agent handle a response that it gets from the queue, to its end."""
    async with serving(context):
        await enqueue(context.bus, log)
        async with asyncio.timeout(30):
            async for _ in log.follow():
                pass
    assert (await context.bus.figures.size(subjects.RESPONSES_STREAM))[0] == 0


async def dead_letter_of(context: Context, data: bytes) -> DeadLetter:
    """Return the dead letter that an agent writes of a message of its queue."""
    bus = context.bus
    letters = await bus.connection.nc.subscribe(subjects.DEAD_FILTER)
    async with serving(context):
        await bus.publish_without_id(subjects.response("m"), data)
        message = await letters.next_msg(30)
    await letters.unsubscribe()
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 0
    return decode_dead_letter(message.data)


async def test_a_response_that_comes_twice_to_a_process_is_carried_out_once(bus: Bus) -> None:
    called, answered = asyncio.Event(), asyncio.Event()
    async with server_of(adding(called, answered)) as target:
        url = f"http://127.0.0.1:{target.port}/mcp"
        digest = schema_digest(ListedTool("add", {}))
        approved = [ApprovedCall("mcpr_1", "calc", "add", "{}", digest)]
        servers = [ServerUse("calc")]
        log = await begin(bus, replace(BEGUN, servers=servers, approved=approved))
        context = context_of(bus, servers={"calc": {"url": url}})
        async with serving(context, drained=False):
            await enqueue(bus, log)
            await called.wait()
            await enqueue(bus, log)
            queue = subjects.RESPONSES_STREAM, subjects.RESPONSES_CONSUMER
            async with asyncio.timeout(30):
                while True:  # Until the second message is delivered as well.
                    if not (await bus.figures.depth(*queue)).num_pending:
                        break
                    await asyncio.sleep(0.1)
            answered.set()
            result = await first_result(log)
    assert result.outcome == "result"


async def test_a_call_continues_while_the_broker_does_not_answer(
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

    async def answer(request: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        if request["method"] == "tools/list":
            return 200, {"tools": [{"name": "add", "inputSchema": {}}]}
        if request["method"] == "tools/call":
            called.set()
            await answered.wait()
        return 200, {"content": []}

    return answer


async def first_result(log: StepLog) -> Result:
    async for step in log.follow():
        if isinstance(step, Result):
            return step
    raise AssertionError("there is no result")


@pytest.mark.parametrize("tenant", ["", "alice"])
async def test_an_unreadable_log_is_a_dead_letter_of_its_tenant(bus: Bus, tenant: str) -> None:
    log = await begin(bus, replace(BEGUN, tenant=tenant))
    result = b'{"type":"result","index":1,"turn":7,"call":0,"outcome":"failed"}'
    await bus.publish_without_id(subjects.step(tenant, log.response_id), result)
    task = to_json(ResponseTask(log.response_id, tenant))
    letter = await dead_letter_of(context_of(bus), task)
    assert (letter.request_id, letter.tenant) == (job_of(log), tenant)
    assert (letter.role, letter.error.code) == ("agent", "undecodable_message")


@pytest.mark.parametrize("data", [b"\xff", b'{"response_id":"a.b","tenant":""}'])
async def test_a_message_that_names_no_response_is_a_dead_letter(bus: Bus, data: bytes) -> None:
    letter = await dead_letter_of(context_of(bus), data)
    assert (letter.role, letter.error.code) == ("agent", "undecodable_message")
    assert (letter.request_id, letter.input) == (None, data)


async def die(bus: Bus, log: StepLog, num_steps: Sequence[int]) -> None:
    """Leave a response in the state after agents died, each when it had written `num_steps[i]`."""
    await enqueue(bus, log)
    queue = subjects.RESPONSES_STREAM, subjects.RESPONSES_CONSUMER
    consumer = await bus.queues.consume(*queue, subjects.RESPONSES_FILTER, 1, 5.0)
    delivery = await consumer.next()
    for number, steps in enumerate(num_steps):
        attempt = AttemptRecord("agent", f"agent-dead{number}", number + 1, 1.0 + number, steps)
        await bus.publish_without_id(subjects.attempts(job_of(log)), to_json(attempt))
    await consumer.stop()
    await delivery.retry(0)


@pytest.mark.parametrize(
    ("num_steps", "code"),
    [([1, 1], "not_found"), ([1, 1, 1], "poison"), ([0, 0, 1], "not_found")],
)
async def test_a_response_of_which_agents_die_is_given_up(
    bus: Bus, num_steps: list[int], code: str
) -> None:
    """A response that is carried out ends, because the one that it continues is deleted."""
    log = await begin(bus, replace(BEGUN, ancestors=["gone"]))
    context = context_of(bus, max_deaths=3)
    await die(bus, log, num_steps)
    async with serving(context), asyncio.timeout(30):
        async for _ in log.follow():
            pass
    error = (await ended_of(bus, log)).error
    assert error is not None
    assert error.code == code
    if code == "poison":
        letter = (await dead_letters.find(bus, job_of(log))).letter
        assert (letter.role, len(letter.history)) == ("agent", len(num_steps))


async def test_a_requeued_response_has_no_history(bus: Bus) -> None:
    log = await begin(bus, replace(BEGUN, ancestors=["gone"]))
    await enqueue(bus, log)
    attempt = to_json(AttemptRecord("agent", "agent-dead", 1, 1.0, 1))
    await bus.publish_without_id(subjects.attempts(job_of(log)), attempt)
    task = to_json(ResponseTask(log.response_id, ""))
    letter = DeadLetter(
        role="agent",
        worker="agent-dead",
        version="0",
        subject=subjects.response("m"),
        request_id=job_of(log),
        attempts=1,
        error=error_info(Poisoned("16 workers died while they processed this request")),
        traceback="",
        history=[],
        request=b"",
        input=task,
        input_len=len(task),
        failed_ms=1.0,
    )
    assert await dead_letters.requeue_response(bus, letter) == log.response_id
    assert not await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(job_of(log)))
    with pytest.raises(NotFound, match="does not contain the response"):
        await dead_letters.requeue_response(bus, replace(letter, input=b""))


async def ended_of(bus: Bus, log: StepLog) -> Ended:
    ended = (await open_log(bus, "", log.response_id)).state.ended
    assert ended is not None
    return ended


@dataclass
class Renderer:
    """A renderer that replies with these errors, each once, and then with few tokens."""

    errors: list[ErrorReply] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 0

    def fail(self, *errors: PagemillError) -> None:
        self.errors += [ErrorReply(error_info(error)) for error in errors]

    def tokenize(self, _: bytes) -> bytes:
        self.called.set()
        self.num_calls += 1
        return to_json(self.errors.pop(0) if self.errors else Tokenized(1, 100, [1]))


@pytest.fixture
async def renderer(bus: Bus) -> Renderer:
    answers = Renderer()
    await bus.add_responder(subjects.renderer("tokenize", "m"), answers.tokenize)
    return answers


TRUNCATED = replace(BEGUN, truncate=True)
# An agent leaves these to its client, like the workers of stages.
ONLY_CLIENTS = (
    "deadline_exceeded",
    "disk_full",
    "encoding_failed",
    "grammar_not_tried",
    "out_of_memory",
)
REPLIES = [
    msgspec.convert(reply, ErrorReply)
    for reply in json.loads((ROOT / "tests" / "recorded" / "error_replies.json").read_text())
]


async def test_an_overloaded_renderer_is_asked_again(bus: Bus, renderer: Renderer) -> None:
    renderer.fail(Overloaded("too many requests"), Unavailable("away"), Overloaded("again"))
    log = await begin(bus, TRUNCATED)
    async with serving(context_of(bus), drained=False):
        await enqueue(bus, log)
        async for step in log.follow():
            if not isinstance(step, Begun):
                assert isinstance(step, Asked)
                break
    assert renderer.errors == []


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.error.code)
async def test_an_error_of_a_renderer_is_stored_as_it_is(
    bus: Bus, renderer: Renderer, reply: ErrorReply
) -> None:
    """One that is retryable is stored after the last attempt."""
    renderer.errors += [reply] * 100
    log = await begin(bus, TRUNCATED)
    await handle(context_of(bus, timeout_s=0.5, max_deliver=2), log)
    error = (await ended_of(bus, log)).error
    assert error == reply.error
    is_repeated = error.retryable and error.fault == "server" and error.code not in ONLY_CLIENTS
    assert (renderer.num_calls > 1) == is_repeated


async def test_a_pause_ends_with_the_drain_of_the_agent(bus: Bus, renderer: Renderer) -> None:
    renderer.fail(*[Overloaded("full")] * 100)
    log, context = await begin(bus, TRUNCATED), context_of(bus)
    async with serving(context):
        await enqueue(bus, log)
        await renderer.called.wait()
    # The next agent gets it.
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 1
    assert (await open_log(bus, "", log.response_id)).state.ended is None
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(job_of(log)))
    attempts = [decode_attempt(message.data) for message in stored]
    assert [attempt and attempt.outcome for attempt in attempts] == ["open", "requeued"]


async def test_a_request_with_the_id_of_a_response_has_other_records(
    bus: Bus, renderer: Renderer
) -> None:
    renderer.fail(WorkerFailure("for the test"))
    log = await begin(bus, TRUNCATED)
    await handle(context_of(bus), log)
    assert (await request_status.find(bus, log.response_id)).attempts == []
    with pytest.raises(NotFound):
        await dead_letters.find(bus, log.response_id)
    await dead_letters.requeue(bus, log.response_id, GenerateRequest("m", prompt="?"))
    assert await bus.has_messages(subjects.ATTEMPTS_STREAM, subjects.attempts(job_of(log)))
    assert (await dead_letters.find(bus, job_of(log))).letter.role == "agent"
    await bus.purge(subjects.REQUESTS_STREAM, subjects.request("m", log.response_id))


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
