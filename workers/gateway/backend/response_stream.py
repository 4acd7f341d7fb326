"""Events of responses, from the log of their steps and the token logs of their turns."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator

from shared import client
from shared.errors import LogTruncated, NotFound
from shared.protocol.records import Failure, Finish, StepState, TokenChunk
from shared.protocol.steps import Answered, Asked, Ended, Sending, Step, painting_id, turn_id
from shared.responses.calls import ServerCall
from shared.state.step_log import StepLog, open_log
from shared.state.token_log import last_of_output, last_record
from workers.gateway.app import AppContext
from workers.gateway.backend.responses import end_if_late, load_token_bytes
from workers.gateway.core.assembler import token_ids_to_decode
from workers.gateway.openai.response_events import ResponseEvents
from workers.gateway.schemas.responses import ResponseEvent

GONE = "the events of this response are not stored any more"


async def wait_for_end(context: AppContext, log: StepLog) -> None:
    """Read the steps of a response until it has ended. Raises NotFound when it is deleted."""
    async for _ in _follow(context, log):
        pass


async def _follow(context: AppContext, log: StepLog) -> AsyncIterator[Step]:
    """Yield all further steps until the response ends, at its deadline at the latest.

    Raises NotFound when it is deleted.
    """
    async with log.watch() as watch:
        while log.state.ended is None:
            new_steps = await watch.next()
            for step in new_steps:
                yield step
                if isinstance(step, Ended):
                    return
            if not new_steps:
                await _open_again(context, log)


async def _open_again(context: AppContext, log: StepLog) -> StepLog:
    """Read the log again. End the response if it is late, so that its followers read the end."""
    current = await open_log(context.bus, log.tenant, log.response_id)
    if current.state.begun is None:
        raise NotFound("the response is deleted", field="id")
    await end_if_late(context, current)
    return current


async def events_of(
    context: AppContext, tenant: str, response_id: str, new_log: StepLog | None = None
) -> AsyncGenerator[ResponseEvent, None]:
    """Yield all events of a response, from its beginning to its end.

    `new_log` is the log of a response that this gateway has just begun. It need not be read again.
    Raises LogTruncated when the token log of a turn is no longer stored.
    """
    log = StepLog(context.bus, tenant, response_id) if new_log is None else new_log
    steps: list[Step] = [] if log.state.begun is None else [log.state.begun]
    if log.state.num_steps != len(steps):  # The response was begun before, under the same name.
        log, steps = StepLog(context.bus, tenant, response_id), []
    steps = steps or await log.refresh()
    begun = log.state.begun
    assert begun is not None
    events = ResponseEvents(response_id, context.token_bytes.of(begun.model))
    async for step, is_past in _all_steps(context, log, steps):
        if isinstance(step, Answered):
            await load_token_bytes(context, log)
        num_turns = len(events.state.turns)
        for event in events.step(step):
            yield event
        for turn in events.state.turns[num_turns:]:
            async for record in _turn_records(context, log, turn, has_ended=is_past):
                await context.token_bytes.load(begun.model, token_ids_to_decode(record), tenant)
                for event in events.token(record):
                    yield event
        async for preview in _previews(context, log, events, step):
            yield preview
        if isinstance(step, Ended):
            return


async def _previews(
    context: AppContext, log: StepLog, events: ResponseEvents, step: Step
) -> AsyncIterator[ResponseEvent]:
    """Yield the previews of the image that is requested at this step, if there is one."""
    begun = events.state.begun
    if begun is None or begun.painter is None or not isinstance(step, Sending):
        return
    call, number = events.state.calls[step.turn, step.call], 0
    if not call.paints or not begun.painter.partial_images:
        return
    async for url in _preview_urls(context, log, call, begun.painter.output):
        file = await client.find_media(context.bus, url, log.tenant)
        if file is None:
            raise LogTruncated(GONE)
        yield events.preview(call, number, base64.b64encode(file).decode())
        number += 1


async def _preview_urls(
    context: AppContext, log: StepLog, call: ServerCall, output: str
) -> AsyncIterator[str]:
    """Yield the URLs of an image's previews; none if the image's request was never published."""
    bus = context.bus
    name = painting_id(log.tenant, log.response_id, call.turn, call.number)

    async def is_void() -> bool:
        state = (await _open_again(context, log)).state
        if state.ended is not None and not _is_recent(context, state.ended):
            raise LogTruncated(GONE)
        return state.ended is not None or not state.calls[call.turn, call.number].is_pending

    if await last_of_output(bus, name, output) is None and await is_void():
        return
    limit_s = context.config.delivery.max_timeout_s
    async for record in client.follow_output(bus, name, output, timeout_s=limit_s, is_void=is_void):
        if isinstance(record, StepState) and record.preview:
            yield record.preview


async def _all_steps(
    context: AppContext, log: StepLog, steps: list[Step]
) -> AsyncIterator[tuple[Step, bool]]:
    """Yield each step, and whether a later step existed at the beginning."""
    for step in steps:
        yield step, step is not steps[-1]
    async for step in _follow(context, log):
        yield step, False


async def _turn_records(
    context: AppContext, log: StepLog, turn: Asked, *, has_ended: bool
) -> AsyncIterator[TokenChunk]:
    """Yield the records of a turn.

    If a turn that `has_ended` has no records, they have expired, or the response ended before the
    request of the turn was published. Raises LogTruncated for expired records.
    """
    bus, name = context.bus, turn_id(log.tenant, log.response_id, turn.turn)
    if has_ended and await last_record(bus, name) is None and not _may_be_void(context, log, turn):
        raise LogTruncated(GONE)

    async def is_void() -> bool:
        return _ended_without(await _open_again(context, log), turn)

    async for record in client.follow(
        bus, name, timeout_s=context.config.delivery.max_timeout_s, is_void=is_void
    ):
        match record:
            case TokenChunk():
                yield record
            case Failure() | Finish():
                return


def _ended_without(log: StepLog, turn: Asked) -> bool:
    """Return whether a response has ended without the answer of this turn."""
    return log.state.ended is not None and len(log.state.answers) <= turn.turn


def _may_be_void(context: AppContext, log: StepLog, turn: Asked) -> bool:
    """Return whether a turn without records never had any.

    Its response has ended without it, too recently for records to have expired.
    """
    ended = log.state.ended
    return ended is not None and _is_recent(context, ended) and _ended_without(log, turn)


def _is_recent(context: AppContext, ended: Ended) -> bool:
    """Return whether the token logs of a response with this end are still stored."""
    return context.now_s < ended.ended_s + context.config.delivery.token_log_age_s
