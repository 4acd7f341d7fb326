"""One response in an agent within this process: what is deleted, late, or cannot go on, ends."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.config_parsing import parse_config
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.steps import ApprovedCall, Begun, ResponseTask, Result, ServerUse, Step
from shared.responses.tools import schema_digest
from shared.stage.runtime import Context
from shared.state import dead_letters, step_log
from shared.state.step_log import StepLog, open_log
from tests.agent.test_mcp_client import server_of
from workers.agent.mcp_client import McpClient
from workers.agent.run import ResponseRun
from workers.agent.worker import Agent

BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi")], {})


def context_of(bus: Bus, **agent: Any) -> Context:
    tree = {"models": {"m": {"path": "m"}}, "agent": agent | {"mcp_networks": ["127.0.0.1/32"]}}
    config = parse_config(json.dumps(tree | {"delivery": {"max_deliver": 1}}), {}, "test")
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
    return await bus.consume(*queue, subjects.RESPONSES_FILTER, 4, 5.0)


async def test_a_log_that_nobody_can_read_is_a_dead_letter(bus: Bus) -> None:
    log = await begin(bus)
    result = b'{"type":"result","index":1,"turn":7,"call":0,"outcome":"failed"}'
    await bus.publish_without_id(subjects.step("", log.response_id), result)
    consumer = await consume_alone(bus)
    task = to_json(ResponseTask(log.response_id, ""))
    await bus.publish(subjects.response("m"), task, log.response_id)
    await Agent(context_of(bus))._handle(await consumer.next())
    assert (await bus.stream_size(subjects.RESPONSES_STREAM))[0] == 0
    letter = await dead_letters.find(bus, log.response_id)
    assert (letter.role, letter.error.code) == ("agent", "undecodable_message")
