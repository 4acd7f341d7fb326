"""Token logs: one subject per output of a request, append-only, fenced, readable from any index.

The log of the text is the request's own log: TokenChunk records with indexes 0, 1, 2, …, then
exactly one Finish or Failure, which ends the request. Another output has pieces of its kind
(MediaChunk, CodeChunk, AudioChunk) and one OutputEnd. A writer must know the last message of its
log. If another writer has appended meanwhile, the server refuses the append.

Any client with access to the bus can write other bytes into a log. Readers skip undecodable
messages and records of unknown kinds. If all messages after a writer's own last one are
undecodable, the writer continues after them.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shared.bus.bus import Bus
from shared.bus.reading import STALE_READ_S, StoredMessage
from shared.errors import Fenced, LogTruncated, PagemillError
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.pipeline import TEXT
from shared.protocol.records import (
    AnyRecord,
    AudioChunk,
    ChoiceDelta,
    CodeChunk,
    Failure,
    Finish,
    ImageRecord,
    LogRecord,
    MediaChunk,
    OutputEnd,
    OutputSummary,
    StageSpan,
    StepState,
    TokenChunk,
    TokenLogprobs,
    VideoRecord,
    error_info,
)
from shared.protocol.stored_size import log_headers, stored_bytes
from shared.state import output_ends
from shared.state.log_records import UnknownRecord, decode_record, is_final, records_of


async def last_record(bus: Bus, request_id: str) -> LogRecord | None:
    """Return the last record of a request's own log of a known kind; None for an empty log."""
    tail = await _read_tail(bus, request_id, TEXT)
    return tail.record if isinstance(tail.record, LogRecord) else None


async def last_of_output(bus: Bus, request_id: str, output: str) -> AnyRecord | None:
    """Return the last record of an output's log of a known kind; None for an empty log."""
    return (await _read_tail(bus, request_id, output)).record


class _Tail(NamedTuple):
    """End of a log."""

    record: AnyRecord | None
    """Final record, or the last record of a kind that this version knows."""
    next_index: int
    last_sequence: int
    """Sequence of the last message, which may be undecodable."""
    headers: Mapping[str, str]
    """Headers of the last message, with the log's size."""


async def _read_tail(bus: Bus, request_id: str, output: str) -> _Tail:
    subject = subjects.tokens(request_id, output)
    last = await bus.read_last(subjects.TOKENS_STREAM, subject)
    if last is None:
        return _Tail(None, 0, 0, {})
    record = decode_record(last.data)
    if record is not None and not isinstance(record, UnknownRecord):
        return _Tail(record, record.index + 1, last.sequence, last.log_headers)
    # The whole log is read only if its last message is not a record of a known kind.
    stored = await bus.read(subjects.TOKENS_STREAM, subject)
    records = records_of(stored, 0)
    readable = [record for record in records if not isinstance(record, UnknownRecord)]
    last_readable = readable[-1] if readable else None
    return _Tail(
        next((record for record in readable if is_final(record)), last_readable),
        records[-1].index + 1 if records else 0,
        stored[-1].sequence if stored else 0,
        last.log_headers,
    )


class LogWriter:
    """Writer of one output's log, until another worker appends to it.

    Every append raises Fenced once another writer has appended. The worker then drops the request
    without a further record.
    """

    def __init__(
        self,
        bus: Bus,
        request_id: str,
        attempt: int,
        output: str,
        stored: Sequence[StoredMessage],
    ) -> None:
        """Begin after `stored`, all messages of the log; `open` reads them. Raises LogTruncated."""
        records = records_of(stored, 0)
        if records and records[0].index != 0:
            raise LogTruncated(
                "the beginning of this request's token log has been removed to make room"
            )
        if records:
            attempt = max(attempt, records[-1].attempt + 1)
        self.output = output
        self.records = [record for record in records if not isinstance(record, UnknownRecord)]
        """Records of known kinds in the log when it was opened."""
        self.stored_ms = stored[-1].stored_ms if stored else 0.0
        """Time at which the last of them was stored, by the broker's clock."""
        self.before_first: Callable[[], Awaitable[None]] | None = None
        """Awaited once, before the first append of this writer; see `begin`."""
        self._bus = bus
        self._request_id = request_id
        self._attempt = attempt
        self._next_index = records[-1].index + 1 if records else 0
        self._last_sequence = stored[-1].sequence if stored else 0
        self._num_bytes = sum(stored_bytes(message.data) for message in stored)

    @classmethod
    async def open(cls, bus: Bus, request_id: str, attempt: int, output: str = TEXT) -> "LogWriter":
        """Open a log. Raises LogTruncated if its beginning has been removed.

        After a task is published again, its deliveries count from 1 again. Attempts in a log only
        rise, so the attempt is higher than any earlier one in the log.
        """
        subject = subjects.tokens(request_id, output)
        stored = await bus.read(subjects.TOKENS_STREAM, subject)
        return cls(bus, request_id, attempt, output, stored)

    @property
    def closed(self) -> bool:
        """Whether the log had its final record when it was opened."""
        return any(is_final(record) for record in self.records)

    async def tokens(
        self, choices: list[ChoiceDelta], prompt_logprobs: list[TokenLogprobs] | None = None
    ) -> None:
        await self._append(TokenChunk(self._next_index, self._attempt, choices, prompt_logprobs))

    async def embedding(self, data: str) -> None:
        """Append an embedding, unless an earlier attempt has."""
        if not self.records:
            await self._append(TokenChunk(self._next_index, self._attempt, [], embedding=data))

    async def media(self, mime: str, offset: int, *, data: str = "", media: str = "") -> None:
        """Append a piece of an output that is not text; see MediaChunk for the arguments."""
        chunk = MediaChunk(self._next_index, self._attempt, mime, offset, data, media)
        await self._append(chunk)

    async def codes(
        self,
        position: int,
        frames: list[list[int]],
        end_token: int | None = None,
        end_character: int | None = None,
    ) -> None:
        """Append codec frames. `position` is the index of the first frame in the speech."""
        index, attempt = self._next_index, self._attempt
        chunk = CodeChunk(index, attempt, position, frames, end_token, end_character)
        await self._append(chunk)

    async def audio(
        self, first_sample: int, pcm: bytes, sample_rate: int, end_token: int | None = None
    ) -> None:
        """Append samples of one channel, 16 bits each, least significant byte first."""
        data = base64.b64encode(pcm).decode()
        num_samples = len(pcm) // 2
        chunk = AudioChunk(
            index=self._next_index,
            attempt=self._attempt,
            first_sample=first_sample,
            num_samples=num_samples,
            sample_rate=sample_rate,
            pcm=data,
            end_token=end_token,
        )
        await self._append(chunk)

    async def step(
        self, number: int, step: int, steps: int, *, state: str = "", preview: str = ""
    ) -> None:
        """Append the progress of an image; see StepState for the arguments."""
        chunk = StepState(self._next_index, self._attempt, number, step, steps, state, preview)
        await self._append(chunk)

    async def image(self, number: int, media: str, size: tuple[int, int], seed: int) -> None:
        """Append a finished image; see ImageRecord for the arguments."""
        await self._append(ImageRecord(self._next_index, self._attempt, number, media, *size, seed))

    async def video(
        self, media: str, size: tuple[int, int], frames: int, fps: int, seed: int
    ) -> None:
        """Append a finished video; see VideoRecord for the arguments."""
        record = VideoRecord(self._next_index, self._attempt, media, *size, frames, fps, seed)
        await self._append(record)

    async def finish(self, summary: OutputSummary, outputs: dict[str, OutputSummary]) -> None:
        """Append the record that ends the request. `outputs` are its outputs other than text."""
        assert summary.usage is not None
        await self._append(
            Finish(
                self._next_index,
                self._attempt,
                summary.usage,
                summary.kv_blocks,
                summary.path,
                outputs,
            )
        )

    async def end(self, summary: OutputSummary) -> None:
        """Append the record that ends an output other than the request's text."""
        await self._append(OutputEnd(self._next_index, self._attempt, summary))

    async def begin(self) -> None:
        """Await `before_first`, unless that has been done."""
        if self.before_first is not None:
            hook, self.before_first = self.before_first, None
            await hook()

    async def _append(self, record: AnyRecord) -> None:
        await self.begin()
        data = to_json(record)
        subject = subjects.append(self._request_id, self.output)
        self._num_bytes += stored_bytes(data)
        headers = log_headers(subject, self._num_bytes)
        while True:
            try:
                last = self._last_sequence
                self._last_sequence = await self._bus.append(subject, data, last, headers=headers)
                break
            except Fenced:
                if await self._is_stored(data):
                    break
        self._next_index += 1

    async def _is_stored(self, data: bytes) -> bool:
        """Return whether a refused append is in the log, because only its ack was lost.

        Records contain index and attempt, so equal bytes at the end of the log are this writer's
        record. If all new messages are undecodable, the append can be repeated after them. Raises
        Fenced if another writer has appended a record.
        """
        subject = subjects.tokens(self._request_id, self.output)
        stored = await self._bus.read(subjects.TOKENS_STREAM, subject, self._last_sequence + 1)
        if not stored:
            # The replica that serves reads may not have the record that the leader refused for.
            raise Fenced(f"another worker writes the log of {self._request_id}")
        new = records_of(stored, self._next_index)
        if new and (len(new) > 1 or all(message.data != data for message in stored)):
            raise Fenced(f"another worker writes the log of {self._request_id}")
        self._last_sequence = stored[-1].sequence
        return bool(new)


async def repeat_end(bus: Bus, request_id: str) -> None:
    """Send the last record of a request that has ended to live readers once more.

    A replica that lags would send an earlier record, or an empty message if it has none.
    """
    await bus.wait_for_replicas()
    await bus.repeat_last(subjects.TOKENS_STREAM, subjects.tokens(request_id))


async def end_request(
    bus: Bus,
    request_id: str,
    attempt: int,
    error: PagemillError,
    path: list[StageSpan],
) -> None:
    """End a request with `error`, unless its log has its final record already.

    Outputs other than its text are closed first, so that no worker appends to them after the end.
    """
    had_outputs = await close_outputs(bus, request_id, attempt)
    await close_log(
        bus,
        request_id,
        TEXT,
        lambda index: Failure(index, attempt, error_info(error), path),
    )
    if not had_outputs:
        # A coordinator may have written the list of outputs meanwhile. A coordinator that writes it
        # later reads that the request has ended, and closes the outputs itself.
        await close_outputs(bus, request_id, attempt)


async def close_outputs(bus: Bus, request_id: str, attempt: int) -> bool:
    """Cut the outputs of a request that have not ended, except its text.

    Return False for a request without a list of outputs, which may not have been admitted yet.
    """
    expected = await output_ends.expected(bus, request_id)
    for output in expected:
        if output != TEXT:
            await close_log(
                bus,
                request_id,
                output,
                lambda index: OutputEnd(index, attempt, OutputSummary(), cut=True),
            )
    return bool(expected)


async def finish_request(
    bus: Bus, request_id: str, attempt: int, ended: dict[str, OutputSummary]
) -> None:
    """End a request with complete outputs, unless its log already has its final record."""
    text = ended.get(TEXT, OutputSummary())
    others = {name: summary for name, summary in ended.items() if name != TEXT}
    spans = {span for summary in ended.values() for span in summary.path}
    path = sorted(spans, key=lambda span: (span.received_ms, span.sent_ms))
    usage = text.usage or output_ends.NO_USAGE
    await close_log(
        bus,
        request_id,
        TEXT,
        lambda index: Finish(index, attempt, usage, text.kv_blocks, path, others),
    )


async def close_log(bus: Bus, request_id: str, output: str, final: Callable[[int], Any]) -> Any:
    """Append `final(index)` to a log, unless it has a final record; return the final record."""
    while True:
        tail = await _read_tail(bus, request_id, output)
        if is_final(tail.record):
            return tail.record
        try:
            record = final(tail.next_index)
            subject = subjects.append(request_id, output)
            await bus.append(subject, to_json(record), tail.last_sequence, headers=tail.headers)
            return record
        except Fenced:
            # Another writer may have ended the log or appended to it, or this record is stored and
            # its ack was lost. The replica that serves reads may lag.
            await asyncio.sleep(STALE_READ_S)


async def cut_outputs(
    bus: Bus, request_id: str, attempt: int, error: PagemillError, path: list[StageSpan]
) -> bool:
    """End a request with its text alone: cut its other outputs, for the reason `error`.

    Return whether the request has ended. If the text has not ended, the stage that writes it ends
    the request later.
    """
    summary, ends = OutputSummary(path=path, error=error_info(error)), None
    for output in await output_ends.expected(bus, request_id):
        if output == TEXT:
            continue
        end = await close_log(
            bus, request_id, output, lambda index: OutputEnd(index, attempt, summary, cut=True)
        )
        if end.cut and end.summary.error is None:
            # An earlier worker has cut the output to end the request with an error, and has died.
            await end_request(bus, request_id, attempt, error, path)
            return True
        ends = await output_ends.add(bus, request_id, output, end.summary)
    if ends is None or not output_ends.is_complete(ends):
        return False
    await finish_request(bus, request_id, attempt, ends.ended)
    return True
