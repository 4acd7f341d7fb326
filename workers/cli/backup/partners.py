"""Repair of a restored cluster: records that refer to a missing message of another stream.

Queues are copied before logs. So the last messages of the logs may belong to requests and
responses that were accepted after their queue was copied. Such a response or batch can continue
from its log, and is queued again. Such a request cannot, because its prompt was in the queue: its
log is removed, and the request is unknown, like all later ones.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.batch_log import decode_batch_begun
from shared.protocol.encoding import to_json
from shared.protocol.steps import ResponseTask, decode_step
from shared.responses.state import state_of
from shared.state.batch_log import open_batches, queue_batch
from shared.state.log_records import is_final
from shared.state.token_log import last_record


class Mended(NamedTuple):
    """Numbers of repaired records."""

    removed_logs: int
    """Removed logs: they have no end, and their request is not queued."""
    requeued_responses: int
    """Responses that have not ended, which were queued again."""
    requeued_batches: int = 0
    """Batches that have not ended, which were queued again."""


async def mend(bus: Bus, log_ends: dict[str, int]) -> Mended:
    """Repair the records after `log_ends`. Raises Unavailable."""
    removed = await _remove_logs(bus, log_ends.get(subjects.TOKENS_STREAM))
    responses = await _requeue(bus, log_ends.get(subjects.STEPS_STREAM))
    batches = await _requeue_batches(bus, log_ends.get(subjects.BATCHES_STREAM))
    return Mended(removed, responses, batches)


async def _remove_logs(bus: Bus, end: int | None) -> int:
    written = await _subjects_after(bus, subjects.TOKENS_STREAM, subjects.TOKENS_FILTER, end)
    suspects = {subjects.id_of_log(subject) for subject in written}
    if suspects:
        async for queued in request_queue.queued_requests(bus):
            suspects.discard(queued.request_id)
    num_removed = 0
    for request_id in suspects:
        if is_final(await last_record(bus, request_id)):
            continue
        await bus.purge(subjects.TOKENS_STREAM, subjects.tokens(request_id))
        await bus.purge(subjects.TOKENS_STREAM, subjects.logs_beside_text(request_id))
        num_removed += 1
    return num_removed


async def _requeue(bus: Bus, end: int | None) -> int:
    num_requeued = 0
    written = await _subjects_after(bus, subjects.STEPS_STREAM, subjects.STEPS_FILTER, end)
    for subject in written:
        stored = await bus.read(subjects.STEPS_STREAM, subject)
        steps = [step for message in stored if (step := decode_step(message.data)) is not None]
        response_id = subjects.last_token(subject)
        state = state_of(response_id, steps)
        if state.begun is None or state.ended is not None:
            continue
        task = to_json(ResponseTask(response_id, state.begun.tenant))
        await bus.publish(subjects.response(state.begun.model), task, response_id)
        num_requeued += 1
    return num_requeued


async def _requeue_batches(bus: Bus, end: int | None) -> int:
    if end is None:
        return 0
    stored = await bus.read(subjects.BATCHES_STREAM, subjects.BATCHES_BEGUN, end + 1)
    orders = [order for message in stored if (order := decode_batch_begun(message.data))]
    states = await open_batches(bus, orders)
    unfinished = [state.begun for state in states if state.ended is None]
    for begun in unfinished:
        await queue_batch(bus, begun)
    return len(unfinished)


async def _subjects_after(bus: Bus, stream: str, subject: str, end: int | None) -> Iterable[str]:
    """Return the subjects of the messages after sequence `end` of a stream, if it has any."""
    if end is None:
        return ()
    return sorted({message.subject for message in await bus.read(stream, subject, end + 1)})
