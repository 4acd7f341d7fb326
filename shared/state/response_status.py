"""Status of a response and the reason why it waits, read from the log of its steps."""

from typing import Literal

from msgspec import Struct

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import InvalidRequest, NotFound
from shared.protocol import names, subjects
from shared.protocol.steps import Asked, decode_step, painting_id, response_of, turn_id
from shared.responses.state import ResponseState, state_of

AGENT = "agent"


class FoundResponse(Struct, frozen=True):
    """Status of a response."""

    response_id: str
    state: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    steps: int
    turn: int | None
    """Current or last turn."""
    call: str | None
    """Current call, as `server.tool` or `image_generation`."""
    waits_s: float
    """Time since the last step."""
    why: str


async def find_any_tenants(bus: Bus, response_id: str) -> FoundResponse | None:
    """Return the status of a response of any tenant. Raises InvalidRequest or Unavailable."""
    if names.TENANT_MARK in response_id or names.PART_MARK in response_id:
        return None  # The id belongs to a request.
    if not names.is_name(response_id):
        raise InvalidRequest(f"a response id {names.NAME_RULE}", field="request_id")
    stored = await bus.read(subjects.STEPS_STREAM, subjects.steps(None, response_id))
    state = _state_of(response_id, stored)
    if state.begun is None:
        return None
    call = state.pending
    return FoundResponse(
        response_id,
        "queued"
        if state.num_steps == 1
        else "in_progress"
        if state.ended is None
        else state.ended.status,
        state.num_steps,
        state.turns[-1].turn if state.turns else None,
        None if call is None or state.ended is not None else str(call),
        (bus.now_ms() - stored[-1].stored_ms) / 1000,
        await _why(bus, state),
    )


async def is_awaited(bus: Bus, request_id: str) -> bool:
    """Return whether a response that has not ended waits for this request. Raises Unavailable."""
    if not response_of(request_id):
        return False
    if await _waits_for(bus, request_id):
        return True
    await bus.wait_for_replicas()
    return await _waits_for(bus, request_id)


async def _waits_for(bus: Bus, request_id: str) -> bool:
    response_id, (_, tenant) = response_of(request_id), names.split_id(request_id)
    stored = await bus.read(subjects.STEPS_STREAM, subjects.steps(tenant, response_id))
    state = _state_of(response_id, stored)
    if state.begun is None or state.ended is not None:
        return False
    return request_id in state.open_requests


def _state_of(response_id: str, stored: list[StoredMessage]) -> ResponseState:
    steps = [step for message in stored if (step := decode_step(message.data)) is not None]
    return state_of(response_id, steps)


async def _why(bus: Bus, state: ResponseState) -> str:
    if state.ended is not None:
        return _end_of(state)
    if not any(beat.role == AGENT for beat in await bus.heartbeats.read()):
        return "no agent is alive"
    assert state.begun is not None
    unlisted = [use.label for use in state.begun.servers if use.label not in state.listings]
    call = state.pending
    if state.num_steps == 1:
        queue = subjects.RESPONSES_STREAM, subjects.RESPONSES_CONSUMER
        try:
            depth = await bus.figures.depth(*queue)
        except NotFound as error:
            return error.message
        return f"no agent has begun it: {depth.num_pending} responses wait for one"
    if unlisted:
        return f"the tools of {unlisted[0]} are being listed"
    if call is not None and call.sendings and call.paints:
        name = painting_id(state.begun.tenant, state.response_id, call.turn, call.number)
        return f"its image is painted: pagemill where {name}"
    if call is not None and call.sendings:
        return f"a call was sent {len(call.sendings)} times, and has no result yet"
    if call is not None:
        return "a call is about to be sent"
    if len(state.turns) > len(state.answers):
        return f"the model writes its turn: pagemill where {_request_of(state, state.turns[-1])}"
    return "an agent is about to take the next step"


def _request_of(state: ResponseState, turn: Asked) -> str:
    assert state.begun is not None
    return turn_id(state.begun.tenant, state.response_id, turn.turn)


def _end_of(state: ResponseState) -> str:
    assert state.ended is not None
    open_names = [name for name in state.approvals if name not in state.decisions]
    if open_names:
        return f"a person must decide on {', '.join(open_names)}"
    if state.ended.error is not None:
        return f"{state.ended.error.code}: {state.ended.error.message}"
    return state.ended.reason or "its log has its last step"
