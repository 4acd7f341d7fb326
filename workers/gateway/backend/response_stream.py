"""Responses followed to their end: events, from the log of steps and the logs of the turns."""

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
    async for _ in _follow(context, log):
        pass


async def _follow(context: AppContext, log: StepLog) -> AsyncIterator[Step]:
    """Yield all further steps, to the end of the response, which comes at the latest when its time
    is over. Raises NotFound when it is deleted."""
    async with log.watch() as watch:
        while log.state.ended is None:
            new = await watch.next()
            for step in new:
                yield step
                if isinstance(step, Ended):
                    return
            if not new:
                await _open_again(context, log)


async def _open_again(context: AppContext, log: StepLog) -> StepLog:
    """Return the log as it is now, ended if it is late: who follows must read the end as well."""
    now = await open_log(context.bus, log.tenant, log.response_id)
    if now.state.begun is None:
        raise NotFound("the response is deleted", field="id")
    await end_if_late(context, now)
    return now


async def events_of(
    context: AppContext, tenant: str, response_id: str, begun_here: StepLog | None = None
) -> AsyncGenerator[ResponseEvent, None]:
    """Yield all events of a response, from its beginning to its end.

    The log need not be read for one that was `begun_here`. Raises LogTruncated when the text of a
    turn is not stored any more as it was written.
    """
    log = StepLog(context.bus, tenant, response_id) if begun_here is None else begun_here
    steps: list[Step] = [] if log.state.begun is None else [log.state.begun]
    if log.state.num_steps != len(steps):  # The response was begun before, under the same name.
        log, steps = StepLog(context.bus, tenant, response_id), []
    steps = steps or await log.refresh()
    begun = log.state.begun
    assert begun is not None
    made = ResponseEvents(response_id, context.token_bytes.of(begun.model))
    async for step, known in _all_steps(context, log, steps):
        if isinstance(step, Answered):
            await load_token_bytes(context, log)
        num_turns = len(made.state.turns)
        for event in made.step(step):
            yield event
        for asked in made.state.turns[num_turns:]:
            async for record in _turn_records(context, log, asked, known=known):
                await context.token_bytes.load(begun.model, token_ids_to_decode(record), tenant)
                for event in made.token(record):
                    yield event
        async for shown in _previews(context, log, made, step):
            yield shown
        if isinstance(step, Ended):
            return


async def _previews(
    context: AppContext, log: StepLog, made: ResponseEvents, step: Step
) -> AsyncIterator[ResponseEvent]:
    """Yield the previews of an image whose request is published from this step on."""
    begun = made.state.begun
    if begun is None or begun.painter is None or not isinstance(step, Sending):
        return
    call, number = made.state.calls[step.turn, step.call], 0
    if not call.paints or not begun.painter.partial_images:
        return
    async for url in _preview_urls(context, log, call, begun.painter.output):
        file = await client.find_media(context.bus, url, log.tenant)
        if file is None:
            raise LogTruncated(GONE)
        yield made.preview(call, number, base64.b64encode(file).decode())
        number += 1


async def _preview_urls(
    context: AppContext, log: StepLog, call: ServerCall, output: str
) -> AsyncIterator[str]:
    """Yield where the previews of an image are; none for one whose request was not published."""
    bus, name = context.bus, painting_id(log.response_id, call.turn, call.number)

    async def is_void() -> bool:
        now = (await _open_again(context, log)).state
        if now.ended is not None and not _is_recent(context, now.ended):
            raise LogTruncated(GONE)
        return now.ended is not None or not now.calls[call.turn, call.number].is_pending

    if await last_of_output(bus, name, output) is None and await is_void():
        return
    limit_s = context.config.delivery.max_timeout_s
    async for record in client.follow_output(bus, name, output, timeout_s=limit_s, is_void=is_void):
        if isinstance(record, StepState) and record.preview:
            yield record.preview


async def _all_steps(
    context: AppContext, log: StepLog, steps: list[Step]
) -> AsyncIterator[tuple[Step, bool]]:
    """Yield each step, and whether a later one was known at the beginning."""
    for step in steps:
        yield step, step is not steps[-1]
    async for step in _follow(context, log):
        yield step, False


async def _turn_records(
    context: AppContext, log: StepLog, asked: Asked, *, known: bool
) -> AsyncIterator[TokenChunk]:
    """Yield the records of a turn. If it has ended, they are `known` to be stored, or gone.

    A turn has none if the response has ended before its request was published.
    """
    bus, name = context.bus, turn_id(log.response_id, asked.turn)
    if known and await last_record(bus, name) is None and not _may_be_void(context, log, asked):
        raise LogTruncated(GONE)

    async def is_void() -> bool:
        return _has_left_out(await _open_again(context, log), asked)

    async for record in client.follow(
        bus, name, timeout_s=context.config.delivery.max_timeout_s, is_void=is_void
    ):
        match record:
            case TokenChunk():
                yield record
            case Failure() | Finish():
                return


def _has_left_out(log: StepLog, asked: Asked) -> bool:
    """Return whether a response has ended without the answer of this turn."""
    return log.state.ended is not None and len(log.state.answers) <= asked.turn


def _may_be_void(context: AppContext, log: StepLog, asked: Asked) -> bool:
    """Return whether a turn without records has never had any: they are not stored for ever."""
    ended = log.state.ended
    return ended is not None and _is_recent(context, ended) and _has_left_out(log, asked)


def _is_recent(context: AppContext, ended: Ended) -> bool:
    """Return whether the token logs of a response are still stored that has ended so."""
    return context.now_s < ended.ended_s + context.config.delivery.token_log_age_s
