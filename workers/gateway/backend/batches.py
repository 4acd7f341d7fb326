"""Operations on batches: begin, find and show them, and the files of their results."""

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

from starlette.requests import Request

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.errors import Fenced, NotFound
from shared.protocol import subjects
from shared.protocol.batch_orders import MAX_BATCH_ID_LEN, BatchOrder
from shared.state import batch_intake, batch_log
from workers.gateway.app import AppContext
from workers.gateway.core.result_positions import ResultPosition, after_line
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import event
from workers.gateway.schemas.batches import (
    BatchBody,
    BatchCounts,
    BatchErrors,
    BatchInputDetails,
    BatchUsage,
)

FILE_PREFIX = "file-"
POLL_S = 5.0
"""Interval in which the log is read, in case a live record was lost."""
Kind = Literal["output", "errors"]
_RESULT_FILE = re.compile(rf"file-([A-Za-z0-9_-]{{1,{MAX_BATCH_ID_LEN}}})-(output|errors)")


class ResultFile(NamedTuple):
    """File with the answers or with the errors of a batch that has ended."""

    state: BatchState
    kind: Kind

    @property
    def file_id(self) -> str:
        return f"{FILE_PREFIX}{self.state.begun.batch_id}-{self.kind}"

    @property
    def num_bytes(self) -> int:
        now = self.state.checkpoint
        return now.output_bytes if self.kind == "output" else now.error_bytes


def result_files(state: BatchState) -> list[ResultFile]:
    """Return the files of a batch that have a line."""
    if state.ended is None or state.ended.removed:
        return []
    files = [ResultFile(state, "output"), ResultFile(state, "errors")]
    return [file for file in files if file.num_bytes]


async def find_result_file(context: AppContext, tenant: str, file_id: str) -> ResultFile | None:
    """Return the file with an id of `ResultFile`. Raises Unavailable."""
    if (match := _RESULT_FILE.fullmatch(file_id)) is None:
        return None
    log = await batch_log.open_batch(context.bus, tenant, match[1])
    files = [] if log is None else result_files(log.state)
    return next((file for file in files if file.file_id == file_id), None)


async def read_result_file(bus: Bus, file: ResultFile) -> AsyncIterator[bytes]:
    """Yield the content of a file, in pieces. Raises Unavailable."""
    sequence = 1
    while sequence:
        records, sequence = await batch_log.read_results(bus, file.state.begun, sequence)
        content = bytearray()
        for _, record in records:
            for line in record.output if file.kind == "output" else record.errors:
                content += bytes(line) + b"\n"
        yield bytes(content)


async def read_page(
    bus: Bus, state: BatchState, start: ResultPosition
) -> tuple[list[tuple[bytes, ResultPosition]], ResultPosition, bool]:
    """Return lines with results, each with the position after it, and the position after them all.

    The last value is False if the log had no further record. Raises Unavailable.
    """
    records, more = await batch_log.read_results(bus, state.begun, start.sequence)
    lines: list[tuple[bytes, ResultPosition]] = []
    for sequence, record in records:
        results = (*record.output, *record.errors)
        num_read = start.num_read if sequence == start.sequence else 0
        lines += [
            (bytes(line), after_line(sequence, number, len(results)))
            for number, line in enumerate(results, 1)
            if number > num_read
        ]
    end = lines[-1][1] if lines else start
    return lines, ResultPosition(more) if more else end, bool(more)


async def result_events(
    context: AppContext, caller: Caller, batch_id: str, start: ResultPosition
) -> AsyncIterator[bytes]:
    """Yield an event for each result, until the batch has ended. Raises NotFound, Unavailable."""
    bus, position, is_longer = context.bus, start, asyncio.Event()
    subject = subjects.stored_batch(subjects.batch_log(caller.tenant, batch_id))
    # Live records are not held for a slow reader: they may have megabytes.
    end_watch = await bus.watch_subjects(subject, lambda _: is_longer.set())
    try:
        while True:
            is_longer.clear()
            # The state is read first, so that no result after the last page is missed.
            state = await find(context, caller, batch_id)
            lines, position, has_more = await read_page(bus, state, position)
            for line, after in lines:
                yield event(line, str(after))
            if not has_more:
                if state.ended is not None:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_longer.wait(), POLL_S)
    finally:
        await end_watch()


async def begin(
    context: AppContext, request: Request, caller: Caller, order: BatchOrder
) -> BatchState:
    """Begin a batch, and return its state. Raises InvalidRequest, NotFound or TooManyBatches.

    The same `Idempotency-Key` from the same tenant means the same batch.
    """
    bus, tenant, name = context.bus, caller.tenant, request.headers.get("idempotency-key")
    batch_id = f"batch_{secrets.token_hex(8)}" if name is None else _id_of(name, tenant)
    if name is not None:
        # A repeated request gets its batch also when no further one may begin.
        log = await batch_log.open_batch(bus, tenant, batch_id)
        if log is not None:
            return log.state
    await context.room.check()
    await context.quotas.check(tenant, [subjects.BATCHES_STREAM])
    begun = await batch_intake.accept(bus, context.config.batch, tenant, batch_id, order)
    try:
        await batch_log.begin(bus, begun)
    except Fenced:
        return await find(context, caller, batch_id)
    return BatchState(begun)


def _id_of(name: str, tenant: str) -> str:
    digest = hashlib.blake2b(f"{tenant}:{name}".encode(), digest_size=16)
    return f"batch_{digest.hexdigest()}"


async def find(context: AppContext, caller: Caller, batch_id: str) -> BatchState:
    """Return the state of a batch. Raises NotFound, also for a batch of another tenant."""
    log = await batch_log.open_batch(context.bus, caller.tenant, batch_id)
    if log is None:
        raise NotFound(f"there is no batch {batch_id!r}, or it has expired", field="id")
    return log.state


def describe(state: BatchState) -> BatchBody:
    begun, now, ended = state.begun, state.checkpoint, state.ended
    files = {file.kind: file.file_id for file in result_files(state)}
    end_time: dict[str, Any] = {} if ended is None else {f"{ended.status}_at": ended.at_s}
    usage = now.usage
    return BatchBody(
        id=begun.batch_id,
        endpoint=begun.endpoint,
        input_file_id=FILE_PREFIX + begun.input_file,
        completion_window=begun.window,
        status=state.status,
        created_at=begun.created_s,
        expires_at=begun.deadline_s,
        in_progress_at=now.began_s,
        cancelling_at=None if state.cancelled is None else state.cancelled.at_s,
        output_file_id=files.get("output"),
        error_file_id=files.get("errors"),
        errors=BatchErrors(data=ended.errors) if ended is not None and ended.errors else None,
        request_counts=BatchCounts(
            total=now.num_lines, completed=now.num_answered, failed=now.num_refused
        ),
        error_counts=now.error_counts,
        usage=BatchUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=BatchInputDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        ),
        metadata=begun.metadata or None,
        **end_time,
    )
