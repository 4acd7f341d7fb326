"""Reader of token logs while they grow: from live records, and from the log for missed ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from shared.bus.bus import Bus
from shared.errors import LogTruncated, Unavailable
from shared.protocol import subjects
from shared.protocol.pipeline import TEXT
from shared.protocol.records import AnyRecord
from shared.state.log_records import UnknownRecord, decode_record, is_final

# Live records may be lost. After this silence the reader reads the log, in growing intervals while
# the log has no new records.
SILENCE_S = 2.0
MAX_SILENCE_S = 15.0
# Time after the deadline in which coordinators end every request that no worker has ended.
GRACE_S = 15.0


class NotEnded(Unavailable):
    """Raised when the log of a request has no final record after its deadline."""


class LogUnreadable(Unavailable):
    """Raised when the broker does not return the log of a stored request."""


class LogReader:
    """Yields each record of one log once and in order, from record `start` to the final one.

    Undecodable messages and records of unknown kinds are skipped. Records of unknown kinds count as
    records of the log only if their index continues it.
    """

    def __init__(self, bus: Bus, request_id: str, start: int, output: str = TEXT) -> None:
        self._bus = bus
        self._subject = subjects.tokens(request_id, output)
        self._expected = start
        self._position = 0
        """Index after the last record that was read, including records before `start`."""
        self._next_sequence = 1
        """Sequence of the first message that was not read from the log yet."""

    @property
    def is_empty(self) -> bool:
        """Whether no record of the log was read."""
        return self._expected == 0

    async def __aenter__(self) -> Self:
        self._live = await self._bus.subscribe(self._subject)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bus.unsubscribe(self._live)

    async def records(
        self,
        *,
        at_once: bool,
        timeout_s: float | None,
        is_void: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[AnyRecord]:
        """Yield the records.

        With `at_once`, the log is read first, because it may have records already. `is_void` is
        called when the log is still empty after a pause, and returns whether it will stay empty.

        Raises LogTruncated if the next record has been removed, LogUnreadable, and NotEnded if
        there is no final record well after `timeout_s`. A log that is read at once, and has no
        record then, has been removed.
        """
        loop = asyncio.get_running_loop()
        give_up = None if timeout_s is None else loop.time() + timeout_s + GRACE_S
        silence_s = 0.0 if at_once else SILENCE_S
        while True:
            began = loop.time()
            new = await self._read(silence_s)
            silent = not new and loop.time() - began >= silence_s
            has_waited = silent and silence_s > 0
            silence_s = min(max(2 * silence_s, SILENCE_S), MAX_SILENCE_S) if silent else SILENCE_S
            for record in new:
                if not is_final(record):
                    yield record
                    continue
                # A caller with the final record may never resume this generator.
                await self._bus.unsubscribe(self._live)
                yield record
                return
            if has_waited and self.is_empty and is_void is not None and await is_void():
                return
            if give_up is not None and not new and loop.time() > give_up:
                if at_once and self.is_empty:
                    raise LogTruncated("this log has been removed to make room")
                raise NotEnded("no worker has ended the request by its deadline")

    async def _read(self, silence_s: float) -> list[AnyRecord]:
        """Return new records in order, live or from the log; none after `silence_s` without any."""
        live = await self._live.next(silence_s) if silence_s else None
        if live is not None:
            record = self._decode(live.data)
            if record is None or self._is_known(record):
                return []
            if record.index <= self._expected:
                self._position = self._expected = record.index + 1
                self._next_sequence = live.sequence + 1
                return [] if isinstance(record, UnknownRecord) else [record]
        place = subjects.TOKENS_STREAM, self._subject, self._next_sequence
        try:
            stored = await self._bus.read(*place)
        except Unavailable as error:
            raise LogUnreadable(error.message) from error
        new = []
        for message in stored:
            self._next_sequence = message.sequence + 1
            record = self._decode(message.data)
            if record is None:
                continue
            self._position = record.index + 1
            if self._is_known(record):
                continue
            if record.index > self._expected:
                raise LogTruncated("the beginning of this log has been removed to make room")
            self._expected = record.index + 1
            if not isinstance(record, UnknownRecord):
                new.append(record)
        return new

    def _is_known(self, record: AnyRecord | UnknownRecord) -> bool:
        """Return whether a record was read before.

        A log in memory that is lost with the broker is written again, perhaps in fewer records.
        Then its final record may have the index of a record that was read.
        """
        return record.index < self._expected and not is_final(record)

    def _decode(self, data: bytes) -> AnyRecord | UnknownRecord | None:
        record = decode_record(data)
        is_foreign = isinstance(record, UnknownRecord) and record.index != self._position
        return None if is_foreign else record
