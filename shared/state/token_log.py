"""The token log: one subject per request, append-only, fenced, readable from any index.

A log is TokenChunk records with indexes 0, 1, 2, …, then exactly one Finish or Failure. Whoever
appends must know the last record; a writer that somebody has overtaken is refused by the server.
"""

import asyncio

from shared.bus.bus import Bus
from shared.errors import Fenced, LogTruncated, PagemillError
from shared.protocol import subjects
from shared.protocol.messages import (
    ChoiceDelta,
    Failure,
    Finish,
    LogRecord,
    StageSpan,
    TokenChunk,
    TokenLogprobs,
    Usage,
    decode_log_record,
    error_info,
    to_json,
)

STALE_READ_S = 0.02


async def read_log(bus: Bus, request_id: str) -> list[LogRecord]:
    """The log as far as it has been written."""
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    return [decode_log_record(message.data) for message in stored]


async def last_record(bus: Bus, request_id: str) -> LogRecord | None:
    stored = await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    return None if stored is None else decode_log_record(stored.data)


def is_final(record: LogRecord) -> bool:
    return not isinstance(record, TokenChunk)


class LogWriter:
    """The right to append to one log, until somebody else does.

    `records` is what the log held when it was opened. Every append raises Fenced once another
    writer has come first; the holder then drops the request without a further word.
    """

    def __init__(
        self, bus: Bus, request_id: str, attempt: int, records: list[LogRecord], last_sequence: int
    ) -> None:
        self.records = records
        self._bus = bus
        self._request_id = request_id
        self._attempt = attempt
        self._next_index = len(records)
        self._last_sequence = last_sequence

    @classmethod
    async def open(cls, bus: Bus, request_id: str, attempt: int) -> "LogWriter":
        """Raises LogTruncated when the log is not whole any more.

        Deliveries are counted anew for what has been made again, but attempts in a log only rise.
        """
        stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
        records = [decode_log_record(message.data) for message in stored]
        if records and records[0].index != 0:
            raise LogTruncated(
                "the beginning of this request's token log has been removed to make room"
            )
        last_sequence = stored[-1].sequence if stored else 0
        if records:
            attempt = max(attempt, records[-1].attempt + 1)
        return cls(bus, request_id, attempt, records, last_sequence)

    @property
    def closed(self) -> bool:
        """Whether the log had its final record when it was opened."""
        return bool(self.records) and is_final(self.records[-1])

    async def tokens(
        self, choices: list[ChoiceDelta], prompt_logprobs: list[TokenLogprobs] | None = None
    ) -> None:
        await self._append(TokenChunk(self._next_index, self._attempt, choices, prompt_logprobs))

    async def finish(self, usage: Usage, kv_blocks: int, path: list[StageSpan]) -> None:
        await self._append(Finish(self._next_index, self._attempt, usage, kv_blocks, path))

    async def _append(self, record: LogRecord) -> None:
        data = to_json(record)
        subject = subjects.append(self._request_id)
        try:
            self._last_sequence = await self._bus.append(subject, data, self._last_sequence)
        except Fenced:
            self._last_sequence = await self._sequence_if_ours(data)
        self._next_index += 1

    async def _sequence_if_ours(self, data: bytes) -> int:
        """An append whose ack was lost is refused when it is repeated, though it is in the log.

        Records carry index and attempt, so equal bytes at the end of the log are our own.
        """
        stored = await self._bus.read(subjects.TOKENS_STREAM, subjects.tokens(self._request_id))
        if not stored or stored[-1].data != data:
            raise Fenced(f"another worker writes the log of {self._request_id}")
        return stored[-1].sequence


async def end_request(
    bus: Bus, request_id: str, attempt: int, error: PagemillError, path: list[StageSpan]
) -> None:
    """End a request with `error`, unless its log has its final record already."""
    subject = subjects.tokens(request_id)
    while True:
        last = await bus.read_last(subjects.TOKENS_STREAM, subject)
        record = None if last is None else decode_log_record(last.data)
        if record is not None and is_final(record):
            return
        index = 0 if record is None else record.index + 1
        failure = Failure(index, attempt, error_info(error), path)
        try:
            await bus.append(
                subjects.append(request_id), to_json(failure), last.sequence if last else 0
            )
            return
        except Fenced:
            # Whoever wrote meanwhile may have ended it, or not; or it was we, and the ack was lost.
            # A replica that answers reads may not know of it yet.
            await asyncio.sleep(STALE_READ_S)
