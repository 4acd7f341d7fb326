"""The end of a request from outside of its work: cancelled, late, or given up by a stage."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from shared.blobs.store import release_by_broker
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import DecodeError, PagemillError, UnsupportedVersion
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef
from shared.protocol.pipeline import TEXT
from shared.protocol.records import StageSpan
from shared.protocol.task_messages import EngineBody
from shared.stage import tasks
from shared.stage.job import Job
from shared.state.text_alone import cut_outputs
from shared.state.token_log import end_request


async def settle(bus: Bus, job: Job, end: Callable[[], Awaitable[object]]) -> None:
    """End a request by `end`, and remove it and its tasks from their queues.

    The message of `job` stays: it comes again if this worker dies, and the caller acknowledges it.
    The places are free before a client sees the end.
    """
    assert job.request_id is not None
    removed = await _remove(bus, job)
    await end()
    await bus.notify(subjects.ended(job.request_id))
    # A task may have been stored in the meantime. One that is stored from now on is removed by the
    # coordinator or the stage that has stored it, which finds the request ended.
    removed += await _remove(bus, job)
    await _release_payloads(bus, removed)


async def leave_queues(bus: Bus, job: Job) -> None:
    """Remove the request of `job`, which has ended, and its other tasks from their queues."""
    await _release_payloads(bus, await _remove(bus, job))


async def _remove(bus: Bus, job: Job) -> list[StoredMessage]:
    """Remove a request and its tasks, except for the message of `job`. Return the tasks.

    The position of the request is known from its tasks. Without a task it waits for its admission,
    which finds the request ended.
    """
    request_id, held = job.request_id, job.delivery
    assert request_id is not None
    stored = await bus.read(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    removed = [task for task in stored if task.subject != held.subject]
    sequences = {subjects.sequence_of(task.msg_id or "", request_id) for task in removed}
    if subjects.is_request(held.subject):
        sequences.discard(held.sequence)
    # The tasks last: they are found again if this worker dies here.
    for sequence in sequences:
        if sequence is not None:
            await bus.delete(subjects.REQUESTS_STREAM, sequence)
    for task in removed:
        await bus.delete(subjects.STAGES_STREAM, task.sequence)
    return removed


async def _release_payloads(bus: Bus, removed: list[StoredMessage]) -> None:
    # After the end: a worker that reads one would have it made again.
    payloads = [ref for task in removed for ref in _payloads_of(task)]
    await asyncio.gather(*(release_by_broker(bus, ref) for ref in payloads))


def _payloads_of(task: StoredMessage) -> list[BlobRef]:
    """Return the payloads of a task for an engine; others have none."""
    with contextlib.suppress(DecodeError, UnsupportedVersion):
        return tasks.decode(task.data, EngineBody)[0].body.blobs()  # type: ignore[no-any-return]
    return []


async def end_with_error(
    bus: Bus, job: Job, output: str, error: PagemillError, path: list[StageSpan]
) -> bool:
    """End the request of a job, or at least this output of it where the text may go on.

    Return whether the request has ended. If not, the stage of its text ends it.
    """
    request_id, attempt = job.request_id, job.delivery.attempt
    if request_id is None:
        return True
    goes_on = job.header is not None and job.header.on_late == "text" and output != TEXT
    if goes_on:
        return await cut_outputs(bus, request_id, attempt, error, path)

    async def end() -> None:
        await end_request(bus, request_id, attempt, error, path, job.tenant)

    await (settle(bus, job, end) if _may_have_other_tasks(job) else end())
    return True


def _may_have_other_tasks(job: Job) -> bool:
    if not subjects.is_stage(job.delivery.subject):
        return job.delivery.attempt > 1
    return job.header is None or job.header.outputs not in ([], [TEXT])
