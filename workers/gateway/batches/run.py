"""One batch in a batcher: validation, the lines in flight, and the blocks of results."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

from msgspec.structs import replace
from starlette.types import ASGIApp

from shared.batches.input_file import (
    InputCheck,
    InputLimits,
    LineCutter,
    ParsedLine,
    RawLine,
    decode_line,
    read_line,
)
from shared.batches.line_set import LineSet
from shared.batches.look_ahead import LookAhead
from shared.batches.open_lines import BLOCK_BYTES, OpenLines
from shared.batches.pace import Pace
from shared.batches.state import FinishedLine, checkpoint_after, is_complete, results_of
from shared.errors import (
    DiskFull,
    NotFound,
    Overloaded,
    PagemillError,
    QuotaExceeded,
    Unavailable,
    WorkerFailure,
)
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.batch_log import (
    BatchBegun,
    BatchEnded,
    BatchRecord,
    Checkpoint,
    Claimed,
    EndStatus,
    LineError,
    Results,
    Validated,
)
from shared.protocol.encoding import to_json
from shared.protocol.names import part_id
from shared.stage.runtime import Context
from shared.state import batch_files
from shared.state.batch_log import BatchLog
from shared.state.media_store import MediaUpload, StoredFile
from workers.gateway.backend.files import describe
from workers.gateway.batches import results
from workers.gateway.batches.calls import BatchApp, Call, call, refusal
from workers.gateway.batches.results import Answer, AnswerFile, Attempts
from workers.gateway.batches.slots import LineSlots
from workers.gateway.core.sound_formats import MEDIA_TYPES
from workers.gateway.schemas.files import BATCH_OUTPUT

# Results wait this long for others of the same block.
FLUSH_S = 0.5
# Bytes of results that wait to be written before no further line begins.
MAX_UNWRITTEN_BYTES = 16 * BLOCK_BYTES
# Room in a message for the checkpoint of a block.
CHECKPOINT_BYTES = 2**17
# Lines of a batch that wait for a slot or for their next attempt, before no further line is added.
# When several slots become free at once, each batch can use as many as are its share.
MAX_WAITING = 64
MAX_WAITING_BYTES = 4 * 2**20
# Pause of a batch without room for its results.
ROOM_PAUSE_S = 2.0
# Live orders may be lost, so the stream is read after this silence.
POLL_S = 5.0
# Time for the requests of a batch that ends early to be cancelled.
WITHDRAW_S = 5.0

# Errors of a broker without room for results.
FULL = (DiskFull, Overloaded, QuotaExceeded)
NO_ROOM = (*FULL, Unavailable)

ENDINGS = {media_type: ending for ending, media_type in MEDIA_TYPES.items()}
"""Endings of the names of stored answers, by media type."""

T = TypeVar("T")
EarlyEnd = Literal["cancelled", "expired"]
Stop = EarlyEnd | Literal["shutdown"]
LineState = Literal["waiting", "in_flight", "unwritten"]
_REFUSALS: dict[EarlyEnd, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line had a result"),
    "expired": ("batch_expired", "the window of the batch ended before this line had a result"),
}


class ShuttingDown(Exception):
    """The batcher drains, so another one continues the batch."""


class InvalidInput(Exception):
    def __init__(self, errors: list[LineError]) -> None:
        super().__init__("the input has errors")
        self.errors = errors


class BatchRun:
    """The work of this process on one batch that has not ended."""

    def __init__(
        self, context: Context, app: BatchApp, endpoints: ASGIApp, slots: LineSlots, log: BatchLog
    ) -> None:
        self.pause = ""
        """Code of the error for which results or lines wait; "" if they do not."""
        self._context = context
        self._bus = context.bus
        self._app = app
        self._endpoints = endpoints
        self._slots = slots
        self._log = log
        self._max_line_bytes = context.config.batch.max_line_mib * 2**20
        self._lines = self._lines_from_checkpoint()
        self._pace = Pace()
        self._running = TaskSet()
        """One task for each line that has begun or waits."""
        self._waiting: dict[asyncio.Task[Any], int] = {}
        """Tasks of lines that wait for a slot, or for their next attempt, with their bytes."""
        self._has_begun = asyncio.Event()
        """Set when a line stops waiting."""
        self._withdrawn = asyncio.Event()
        """Set when the requests in flight are to be cancelled."""
        self._ends_early = False
        """Whether the batch ends before all lines have results. It does not wait for their room."""
        self._has_results = asyncio.Event()
        self._may_begin = asyncio.Event()
        """Cleared while too many results wait to be written."""
        self._may_begin.set()
        self._appending = asyncio.Lock()
        """Held during an append, which must not be cancelled."""

    @property
    def _begun(self) -> BatchBegun:
        return self._log.state.begun

    @property
    def _checkpoint(self) -> Checkpoint:
        return self._log.state.checkpoint

    @property
    def _now_s(self) -> int:
        return int(self._bus.now_ms() / 1000)

    @property
    def _num_unstored(self) -> int:
        now = self._checkpoint
        return now.num_lines - now.num_answered - now.num_refused

    def lines_by_state(self) -> dict[LineState, int]:
        """Return the numbers of lines without a stored result."""
        num_begun = len(self._running) - len(self._waiting)
        num_unwritten = len(self._lines.finished)
        # A line that has just ended may still be running.
        num_waiting = max(0, self._num_unstored - num_begun - num_unwritten)
        return {"waiting": num_waiting, "in_flight": num_begun, "unwritten": num_unwritten}

    @property
    def is_late(self) -> bool:
        """Whether the lines will not end within the window at their pace."""
        return self._pace.is_late(self._num_unstored, self._begun.deadline_s - self._now_s)

    def _lines_from_checkpoint(self) -> OpenLines:
        now = self._log.state.checkpoint
        return OpenLines(LineCutter(self._max_line_bytes, now.next_line, now.next_offset))

    async def carry_out(self) -> bool:
        """Return True when the batch has ended, and False when this batcher shuts down.

        Raises Fenced if another batcher has claimed the batch, and Unavailable.
        """
        try:
            await self._append(
                lambda index, at_s: Claimed(index, at_s, self._context.worker, self._checkpoint)
            )
            await self._run_to_end()
        except InvalidInput as error:
            await self._end("failed", error.errors)
        except ShuttingDown:
            return False
        return True

    async def _run_to_end(self) -> None:
        """Run all lines, and end the batch. Raises InvalidInput or ShuttingDown."""
        begun = self._begun
        try:
            file = await batch_files.look_up(self._bus, begun.input_file, begun.tenant)
            if file is None:
                raise NotFound("the input file is not stored any more", field="input_file_id")
            stop = await self._run(file)
        except NotFound as error:
            errors = [LineError(error.code, error.message, param=error.field)]
            is_cancelled = await self._log.is_cancelled()
            await self._end_early("cancelled" if is_cancelled else "failed", errors)
            return
        if stop is not None:
            await self._end_early(stop, [], file)
        elif is_complete(self._checkpoint):
            await self._end("completed")
        else:
            raise WorkerFailure("lines of the batch have ended without a result")

    async def _run(self, file: StoredFile) -> EarlyEnd | None:
        """Run the lines, and return the reason to end the batch before all of them have results.

        Raises ShuttingDown, and NotFound if the file is removed meanwhile.
        """
        working = asyncio.create_task(self._work(file))
        writing = asyncio.create_task(self._write())
        stopping = asyncio.create_task(self._wait_stop())
        tasks: set[asyncio.Task[Any]] = {working, writing, stopping}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            if working.done():
                working.result()
            stop = None if working.done() else stopping.result()
            if stop in _REFUSALS:
                await self._withdraw(working)
        except NotFound:
            await self._withdraw(working)
            raise
        finally:
            async with self._appending:
                # Requests in flight stay there: the next batcher finds them by their ids.
                pending = [*tasks, *self._running]
                for task in pending:
                    task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if stop == "shutdown":
            await self._flush()
            raise ShuttingDown
        return stop

    async def _withdraw(self, working: asyncio.Task[None]) -> None:
        """End the lines that have begun or wait: cancel their requests."""
        self._ends_early = True
        if self._checkpoint.began_s is None:
            # The check of the file continues, because the lines get errors only after it.
            await asyncio.wait({working})
        async with self._appending:
            working.cancel()
        self._withdrawn.set()
        for task in self._waiting:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=WITHDRAW_S)

    @property
    def _is_ahead(self) -> bool:
        """Whether enough lines wait."""
        num_bytes = sum(self._waiting.values())
        return len(self._waiting) >= MAX_WAITING or num_bytes >= MAX_WAITING_BYTES

    async def _work(self, file: StoredFile) -> None:
        if self._checkpoint.began_s is None:
            await self._validate(file)
        if self._ends_early:
            return
        async for number, line in self._in_order(file):
            while self._is_ahead:
                self._has_begun.clear()
                await self._has_begun.wait()
            await self._may_begin.wait()
            task = self._running.start(self._run_line(number, line))
            self._waiting[task] = len(line.body)
        while self._running:
            await asyncio.wait(self._running)
        await self._flush()

    async def _validate(self, file: StoredFile) -> None:
        """Check the whole input. Raises InvalidInput."""
        config = self._context.config
        limits = InputLimits(
            self._begun.endpoint, config.models, config.batch.max_lines, self._max_line_bytes
        )
        check = InputCheck(limits)
        async for data, is_last in batch_files.read(self._bus, file, self._begun.tenant):
            check.feed(data, is_last=is_last)
            if check.is_over:
                break
        if check.errors:
            raise InvalidInput(check.errors)
        await self._append(
            lambda index, at_s: Validated(
                index, at_s, replace(self._checkpoint, num_lines=check.num_lines, began_s=at_s)
            )
        )

    async def _unfinished(self, file: StoredFile) -> AsyncIterator[RawLine]:
        """Yield the lines without a result, from the checkpoint on."""
        checkpoint, lines = self._checkpoint, self._lines
        finished = LineSet.unpack(checkpoint.finished)
        async for line in batch_files.read_lines(self._bus, file, self._begun.tenant, lines.cutter):
            if line.number > checkpoint.num_lines:
                return
            if line.number not in finished:
                lines.offsets[line.number] = line.offset
                yield line

    async def _in_order(self, file: StoredFile) -> AsyncIterator[tuple[int, ParsedLine]]:
        """Yield the lines without a result, ordered within each look-ahead."""
        lines: LookAhead[tuple[int, ParsedLine]] = LookAhead()
        async for raw in self._unfinished(file):
            line = read_line(raw.content)
            lines.add((raw.number, line), line.body)
            if lines.is_full:
                for each in lines.take():
                    yield each
        for each in lines.take():
            yield each

    async def _run_line(self, number: int, line: ParsedLine) -> None:
        """Call the endpoint of the batch until the line has a result, or is withdrawn."""
        batch_id = self._begun.batch_id
        answer = await self._answer(number, line)
        if answer is None:
            return
        result = results.answered(batch_id, number, line.custom_id, answer)
        if len(result.content) > (limit := self._bus.max_payload - CHECKPOINT_BYTES):
            message = f"the answer has more than {limit} bytes, the limit of a line of a batch"
            result = results.refused(batch_id, number, line.custom_id, "answer_too_large", message)
        self._add(result)

    async def _answer(self, number: int, line: ParsedLine) -> Answer | None:
        """Call the endpoint until its answer is the result of the line; None if withdrawn."""
        begun, attempts = self._begun, Attempts()
        retries = self._context.metrics.counter("batch_line_retries_total")
        while True:
            request_id = part_id(begun.batch_id, f"{number}-{attempts.number}")
            question = Call(begun.endpoint, line.body, begun.tenant, request_id)
            upload = MediaUpload(self._bus, begun.tenant)
            async with self._slot(line):
                answer = await self._call(question, upload)
            if upload.num_bytes and (answer is None or answer.file is None):
                self._app.background.start(upload.abort())
            if answer is not None and answer.file is not None:
                answer = await self._store_file(number, answer, answer.file)
            if answer is None:
                return None
            delay_s = attempts.delay_after(answer.status, answer.body, random.random())
            if delay_s is None:
                return answer
            retries.add()
            with self._wait(line):
                await asyncio.sleep(delay_s)

    @contextlib.asynccontextmanager
    async def _slot(self, line: ParsedLine) -> AsyncIterator[None]:
        """Wait for a slot of the line's model and for a disk with room; hold the slot in the body.

        Raises ShuttingDown if the disk is full until the drain.
        """
        begun = self._begun
        async with contextlib.AsyncExitStack() as stack:
            with self._wait(line):
                slot = self._slots.slot(line.model, begun.tenant, begun.deadline_s)
                await stack.enter_async_context(slot)
                # A refused request would write its record to the full disk at each attempt.
                await self._with_room(self._app.room.check, waits=True)
            yield

    @contextlib.contextmanager
    def _wait(self, line: ParsedLine) -> Iterator[None]:
        """Count the task of a line as waiting during the body."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = len(line.body)
        try:
            yield
        finally:
            self._waiting.pop(task, None)
            self._has_begun.set()

    async def _store_file(self, number: int, answer: Answer, content: AnswerFile) -> Answer | None:
        """Store the content of an answer for as long as the results of the batch.

        Return the answer with the object of the file as its body; None if the batch ends early, and
        there is no room. Raises ShuttingDown.
        """
        begun, ending = self._begun, ENDINGS.get(content.media_type, "bin")
        filename = f"{begun.batch_id}_{number}.{ending}"
        head = replace(content.head, filename=filename, purpose=BATCH_OUTPUT)

        async def adopt() -> StoredFile:
            await self._check_room()
            expires_s, tenant = begun.expires_s, begun.tenant
            return await batch_files.adopt(self._bus, content.name, head, expires_s, tenant)

        try:
            file = await self._with_room(adopt)
        except FULL:
            return None
        except NotFound:
            # The broker has deleted the upload to make room. The request has the content again.
            return refusal(Unavailable("the content of the answer is lost"), answer.request_id)
        body = to_json(describe(self._app, file))
        return Answer(answer.status, body, answer.request_id)

    async def _call(self, question: Call, upload: MediaUpload) -> Answer | None:
        """Store the files that a line names, and return the answer of its endpoint."""
        try:
            await self._app.lender.lend(question.body, question.tenant)
        except PagemillError as error:
            return refusal(error, question.request_id)
        return await call(self._endpoints, question, self._withdrawn, upload)

    def _add(self, result: FinishedLine) -> None:
        self._lines.add(result)
        self._has_results.set()
        if self._lines.num_bytes > MAX_UNWRITTEN_BYTES:
            self._may_begin.clear()

    async def _end_early(
        self,
        status: EarlyEnd | Literal["failed"],
        errors: list[LineError],
        file: StoredFile | None = None,
    ) -> None:
        """End the batch before all lines have results. Each other line of `file` gets an error.

        Results without room are dropped, because room might come only when the batch has ended.
        Raises InvalidInput if the file was not checked before, and has errors.
        """
        self._ends_early = True
        try:
            await self._flush()
            if file is not None and status != "failed":
                await self._check_room()
                await self._refuse_rest(file, *_REFUSALS[status])
        except (*FULL, NotFound) as error:
            message = f"{self._num_unstored} lines have no result: {error.message}"
            errors = [*errors, LineError(error.code, message)]
        await self._end(status, errors)

    async def _refuse_rest(self, file: StoredFile, code: str, message: str) -> None:
        """Write an error for each line without a result."""
        if self._checkpoint.began_s is None:
            await self._validate(file)
        self._lines = lines = self._lines_from_checkpoint()
        batch_id = self._begun.batch_id
        async for line in self._unfinished(file):
            custom_id = decode_line(line.content).custom_id
            lines.add(results.refused(batch_id, line.number, custom_id, code, message))
            if lines.num_bytes >= BLOCK_BYTES:
                await self._write_block()
        await self._flush()

    async def _wait_stop(self) -> Stop:
        """Wait for the reason to stop before all lines have results."""
        begun, shutdown = self._begun, self._context.shutdown
        subject = subjects.batch_cancelled(begun.tenant, begun.batch_id)
        live = await self._bus.subscribe(subjects.stored_batch(subject))
        stopping = asyncio.create_task(shutdown.asked.wait())
        try:
            while not stopping.done():
                now = self._checkpoint
                self._pace.observe(self._now_s, now.num_answered + now.num_refused)
                with contextlib.suppress(Unavailable):
                    if await self._log.is_cancelled():
                        return "cancelled"
                left_s = begun.deadline_s - self._bus.now_ms() / 1000
                if left_s <= 0:
                    return "expired"
                order = asyncio.create_task(live.next(min(left_s, POLL_S)))
                await asyncio.wait({order, stopping}, return_when=asyncio.FIRST_COMPLETED)
                order.cancel()
            return "shutdown"
        finally:
            stopping.cancel()
            await self._bus.unsubscribe(live)

    # -- records ----------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write the results as they arrive, in blocks. Never returns."""
        while True:
            await self._has_results.wait()
            await asyncio.sleep(FLUSH_S)
            self._has_results.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Write all results that wait."""
        while await self._write_block():
            pass

    async def _write_block(self) -> bool:
        """Write the oldest results, as many as fit into one record. Return False if none wait."""
        async with self._appending:
            if not (block := self._lines.take_block()):
                return False
            position = self._lines.position_before
            checkpoint = checkpoint_after(self._checkpoint, block, position)
            index, at_s = self._log.next_index, self._now_s
            await self._store(results_of(index, at_s, block, checkpoint))
            self._count(block)
        if self._lines.num_bytes <= MAX_UNWRITTEN_BYTES:
            self._may_begin.set()
        return True

    def _count(self, block: list[FinishedLine]) -> None:
        for result in block:
            outcome = "refused" if result.code else "answered"
            self._context.metrics.counter("batch_lines_total", outcome=outcome).add()

    async def _end(self, status: EndStatus, errors: list[LineError] | None = None) -> None:
        await self._append(
            lambda index, at_s: BatchEnded(index, at_s, status, self._checkpoint, errors or [])
        )
        self._context.metrics.counter("batches_ended_total", status=status).add()

    async def _append(self, record: Callable[[int, int], BatchRecord]) -> None:
        """Append the record that `record` returns for its index and time."""
        async with self._appending:
            await self._store(record(self._log.next_index, self._now_s))

    async def _store(self, record: BatchRecord) -> None:
        """Append a record as soon as the broker has room for it. Raises like `_with_room`."""
        is_result = isinstance(record, Results)

        async def append() -> None:
            # Results of lines that have ended are few.
            if is_result and not self._ends_early:
                await self._check_room()
            await self._log.append(record)

        await self._with_room(append, waits=not is_result)

    async def _check_room(self) -> None:
        """Raises DiskFull or QuotaExceeded."""
        await self._app.room.check()
        await self._app.quotas.check(self._begun.tenant, [subjects.BATCHES_STREAM])

    async def _with_room(self, write: Callable[[], Awaitable[T]], *, waits: bool = False) -> T:
        """Write to the broker as soon as it has room.

        Raises ShuttingDown if it has none before the drain. The results are then not lost: the next
        batcher gets the same answers by the ids of the requests. Unless it `waits` in any case, it
        raises DiskFull, Overloaded or QuotaExceeded if the batch ends early.
        """
        code = ""
        while True:
            try:
                written = await write()
            except NO_ROOM as error:
                if self._ends_early and not waits and isinstance(error, FULL):
                    raise
                code = error.code
                self._log_pause(code)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._context.shutdown.asked.wait(), ROOM_PAUSE_S)
                    raise ShuttingDown from error
            else:
                # Another coroutine may wait for a different reason.
                if self.pause == code:
                    self.pause = ""
                return written

    def _log_pause(self, code: str) -> None:
        if self.pause != code:
            self.pause = code
            self._context.log.warning("batch_paused", batch_id=self._begun.batch_id, reason=code)
