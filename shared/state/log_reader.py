"""Reading of token logs while they grow: live records in order, and the log itself for the rest."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from shared.bus.bus import Bus
from shared.errors import LogTruncated, Unavailable
from shared.protocol import subjects
from shared.protocol.pipeline import TEXT
from shared.protocol.records import AnyRecord
from shared.state.log_records import UnknownRecord, decode_record, is_final

# Live records may be lost on the way. After this silence the reader looks into the log, and less
# and less often while nothing is new there.
SILENCE_S = 2.0
MAX_SILENCE_S = 15.0
# By then a coordinator has ended every request that no worker has ended.
GRACE_S = 15.0


class NotEnded(Unavailable):
    """The request's time is over, and its log has no final record."""


class LogReader:
    """Yields each record of one log once and in order, from record `start` to the final one.

    Bytes that are no record, and records of a kind that this version does not know, are skipped.
    The latter count as records of the log only if their index continues it.
    """

    def __init__(self, bus: Bus, request_id: str, start: int, output: str = TEXT) -> None:
        self._bus = bus
        self._subject = subjects.tokens(request_id, output)
        self._expected = start
        self._position = 0
        """The index after that of the last record that was read, wanted or not."""
        self._next_sequence = 1
        """The first message that has not been read from the log yet."""

    @property
    def is_empty(self) -> bool:
        """Whether no record of the log has been seen."""
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
        """`at_once` says that the log may have records already. `is_void` is asked after a silence
        whether a log without any will stay so.

        Raises LogTruncated when the next record has been removed, and NotEnded when there is none
        well after `timeout_s`.
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
                # A caller that has the final record may never resume this generator.
                await self._bus.unsubscribe(self._live)
                yield record
                return
            if has_waited and self.is_empty and is_void is not None and await is_void():
                return
            if give_up is not None and not new and loop.time() > give_up:
                raise NotEnded("no worker has ended the request by its deadline")

    async def _read(self, silence_s: float) -> list[AnyRecord]:
        """New records in order, live or from the log; none after `silence_s` without any."""
        live = await self._live.next(silence_s) if silence_s else None
        if live is not None:
            record = self._decode(live.data)
            if record is None or self._is_known(record):
                return []
            if record.index <= self._expected:
                self._position = self._expected = record.index + 1
                self._next_sequence = live.sequence + 1
                return [] if isinstance(record, UnknownRecord) else [record]
        stored = await self._bus.read(subjects.TOKENS_STREAM, self._subject, self._next_sequence)
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
        """Whether a record has been read before.

        A log in memory that is lost with the broker is written anew, perhaps in fewer records: then
        its end has the index of one that was read.
        """
        return record.index < self._expected and not is_final(record)

    def _decode(self, data: bytes) -> AnyRecord | UnknownRecord | None:
        record = decode_record(data)
        is_foreign = isinstance(record, UnknownRecord) and record.index != self._position
        return None if is_foreign else record
