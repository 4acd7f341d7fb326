"""Responses at a gateway, in a real broker and without agents."""

import asyncio
import json
import secrets
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.requests import Request

from shared.bus.bus import Bus
from shared.config.parsing import parse_config
from shared.errors import ContextTooLong, Overloaded
from shared.protocol import subjects
from shared.protocol.audit import AuditRecord
from shared.protocol.encoding import to_json
from shared.protocol.items import (
    ApprovalResponseItem,
    FunctionOutputItem,
    InputFilePart,
    InputImagePart,
    InputTextPart,
    ListedTool,
    MessageItem,
)
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall, GenerateRequest, Message
from shared.protocol.steps import (
    Answered,
    Asked,
    Begun,
    Decided,
    Ended,
    Listed,
    ServerUse,
    Step,
    turn_id,
)
from shared.state import audit_log
from shared.state.step_log import StepLog, open_log
from shared.telemetry.metrics import Metrics
from workers.gateway.app import AppContext
from workers.gateway.backend import approvals, response_stream, responses
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import ApprovalUsed, StoreFull
from workers.gateway.openai.response_object import without_images

BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi", "msg_1")], {})


def app_of(bus: Bus, **agent: Any) -> AppContext:
    config = parse_config(json.dumps({"models": {"m": {"path": "m"}}, "agent": agent}), {}, "test")
    return AppContext(bus, config, Metrics("gateway", "x"), "x")


def new_name() -> str:
    return f"resp_{secrets.token_hex(8)}"


async def stored(bus: Bus, *steps: Step, tenant: str = "") -> StepLog:
    log = StepLog(bus, tenant, new_name())
    for step in steps:
        await log.append(replace(step, tenant=tenant) if isinstance(step, Begun) else step)
    return log


def ended(status: Any = "completed") -> Ended:
    return Ended(0, status, 2)


async def test_a_tenants_share_counts_what_is_not_to_be_stored_and_bytes(bus: Bus) -> None:
    tenant = secrets.token_hex(4)
    await stored(bus, replace(BEGUN, store=False), tenant=tenant)
    large = replace(BEGUN, input=[MessageItem("user", "x" * 2**20, "msg_1")], store=False)
    log = await stored(bus, large, ended(), tenant=tenant)
    for limits in ({"max_stored": 2}, {"max_stored_mib": 1}):
        app = app_of(bus, **limits)
        await app.store_use.read(tenant)
        await app.store_use.read_exact(tenant)  # On a busy machine the first measure takes long.
        with pytest.raises(StoreFull, match="2 responses"):
            await responses.check_room(app, tenant)
        await responses.check_room(app, "other")
    await responses.delete_response(app, log)
    for _ in range(2):  # The measured responses, then those begun since.
        await responses.check_room(app, tenant)
        begun = replace(large, tenant=tenant)
        log = await responses.begin(app, begun, new_name(), is_named=False)
        with pytest.raises(StoreFull):
            await responses.check_room(app, tenant)
        await responses.delete_response(app, log)


async def test_a_response_that_a_client_has_named_is_queued_after_its_first_step(bus: Bus) -> None:
    """An agent drops a task without a step, and the broker a second task under the same name."""
    barred = new_name()
    await StepLog(bus, "", barred).append(ended("cancelled"))
    _, before = await bus.figures.sequence_range(subjects.RESPONSES_STREAM)
    with pytest.raises(ApprovalUsed):
        await responses.begin(app_of(bus), BEGUN, barred, is_named=True)
    await responses.begin(app_of(bus), BEGUN, new_name(), is_named=True)
    _, after = await bus.figures.sequence_range(subjects.RESPONSES_STREAM)
    assert after == before + 1


async def test_long_conversations_are_refused_and_take_memory_of_bodies(bus: Bus) -> None:
    large = replace(BEGUN, input=[MessageItem("user", "x" * 2**19, "msg_1")])
    first = await stored(bus, large, ended())
    names = [first.response_id]
    for _ in range(2):
        log = await stored(bus, replace(large, ancestors=[*names]), ended())
        names.append(log.response_id)
    scope: dict[str, Any] = {"type": "http"}
    with pytest.raises(ContextTooLong) as refused:
        await responses.find_context(
            app_of(bus, max_conversation_mib=1), Request(scope), Caller("", ""), names[-1]
        )
    assert refused.value.field == "previous_response_id"
    app = app_of(bus)
    before, logs = await responses.find_context(app, Request(scope), Caller("", ""), names[-1])
    assert [log.response_id for log in logs] == before.ancestors == names
    assert scope["body_bytes"] > 3 * 2**20

    def reserve_all() -> None:
        while True:
            app.bodies.reserve(Request(scope), 2**20)

    with pytest.raises(Overloaded):
        reserve_all()
    with pytest.raises(Overloaded):
        await responses.find_context(app, Request(scope), Caller("", ""), names[-1])


ASKING: list[Step] = [
    replace(BEGUN, servers=[ServerUse("calc")], parser="hermes"),
    Listed(0, "calc", [ListedTool("add", {"type": "object"})]),
    Asked(0, 0),
    Answered(0, 0, "", [FunctionCall("calc__add", "{}")], Usage(1, 1)),
    ended(),
]


async def test_an_approval_for_a_response_that_could_not_begin_is_free(bus: Bus) -> None:
    app, log = app_of(bus), await stored(bus, *ASKING)
    (request_id,) = log.state.approvals
    items = [ApprovalResponseItem(request_id, True, "mcpa_1")]
    lost, owner, late = new_name(), new_name(), new_name()
    alice = Caller("alice", "acme")
    assert await approvals.decide(bus, alice, items, [log], lost)
    recorded = await anext(audit_log.read_newest(bus))
    assert recorded.identity == "gateway"
    assert recorded.record == AuditRecord("approval", "alice", f"{request_id} approved", "acme")
    # Its gateway fails here, and the client asks again without naming the response.
    (call,) = await approvals.decide(bus, Caller("", ""), items, [log], owner)
    with pytest.raises(ApprovalUsed):
        await responses.begin(app, replace(BEGUN, approved=[call]), lost, is_named=True)
    begun = await responses.begin(app, replace(BEGUN, approved=[call]), owner, is_named=False)
    assert begun.state.calls
    assert [call] == await approvals.decide(bus, Caller("", ""), items, [log], owner)
    for name in (late, lost):
        with pytest.raises(ApprovalUsed, match=owner):
            await approvals.decide(
                bus, Caller("", ""), items, [await open_log(bus, "", log.response_id)], name
            )
    assert list(log.state.decisions.values())[-1:] == [Decided(6, request_id, True, owner)]


async def test_a_turn_is_cancelled_whose_response_could_not_begin(bus: Bus) -> None:
    app, begun = app_of(bus), replace(BEGUN, asks=True)
    barred, name = await stored(bus, ended("cancelled")), new_name()
    request = GenerateRequest("m", messages=[Message("user", "Hi")])
    first = responses.FirstTurn(request, {})
    with pytest.raises(ApprovalUsed):
        await responses.begin(app, begun, barred.response_id, first, is_named=False)
    log = await responses.begin(app, begun, name, first, is_named=False)
    assert log.state.turns == [Asked(0, 0)]

    async def is_cancelled(response_id: str) -> bool:
        subject = subjects.cancel(turn_id("", response_id, 0))
        return await bus.has_messages(subjects.CANCELS_STREAM, subject)

    assert await is_cancelled(barred.response_id)
    assert not await is_cancelled(name)
    # The turn has no separate step, but is cancelled with the response.
    await responses.cancel_response(app, log)
    assert await is_cancelled(name)


async def test_responses_without_an_agent_end(bus: Bus) -> None:
    app = app_of(bus)
    now_s = app.now_s
    old = replace(BEGUN, created_s=now_s - 700)
    for waiting in (await stored(bus, old), await stored(bus, replace(old, asks=True))):
        response = await responses.find_response(app, Caller("", ""), waiting.response_id)
        assert (response.state.ended or ended()).status == "failed"
    behind = await stored(bus, replace(old, background=True))
    begun = await stored(bus, old, Asked(0, 0))
    for log in (behind, begun):
        response = await responses.find_response(app, Caller("", ""), log.response_id)
        assert response.state.ended is None
    late = await stored(bus, replace(old, background=True, deadline_s=now_s - 1), Asked(0, 0))
    async with asyncio.timeout(20):
        await response_stream.wait_for_end(app, late)
    assert late.state.ended is not None
    assert (late.state.ended.error is not None) == (late.state.ended.status == "failed")


async def test_a_stream_does_not_wait_for_a_turn_that_was_never_published(bus: Bus) -> None:
    app, log = app_of(bus), await stored(bus, BEGUN, Asked(0, 0))
    events = response_stream.events_of(app, "", log.response_id)
    assert (await anext(events)).type == "response.created"
    following = asyncio.create_task(_kinds(events))
    await responses.cancel_response(app, log)
    async with asyncio.timeout(30):
        kinds = await following
        assert kinds == ["response.in_progress", "response.incomplete"]
        # Whoever comes later sees the same, as long as the logs of turns are stored.
        assert (await _kinds(response_stream.events_of(app, "", log.response_id)))[1:] == kinds


async def _kinds(events: Any) -> list[str]:
    return [event.type async for event in events]


def test_images_of_results_are_left_out_as_those_of_messages() -> None:
    image = InputImagePart("data:image/png;base64,AAAA")
    parts: list[InputTextPart | InputImagePart | InputFilePart] = [InputTextPart("a"), image]
    for item in (MessageItem("user", [*parts]), FunctionOutputItem("call_1", parts)):
        text = to_json(without_images(item))
        assert b"base64" not in text
        assert b"input_image" in text
