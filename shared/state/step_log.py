"""Logs of steps: one subject for each response, append-only, fenced, readable from its beginning.

A writer must know all steps before its own. The server refuses one that another writer has
overtaken, which then reads what is new and plans anew.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.messaging import LiveSubscription
from shared.bus.reading import StoredMessage
from shared.errors import ContextTooLong, DecodeError, Fenced, NotFound, PayloadTooLarge
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.steps import Begun, Ended, Step, decode_step
from shared.responses.state import ResponseState

# Live steps may be lost on the way: after this silence the log is read.
SILENCE_S = 2.0
READ_AT_ONCE = 8
PREVIOUS = "previous_response_id"
MAX_SILENCE_S = 15.0
UNSTORED_TTL_S = 3600.0
"""Time for which the steps of a response are kept that is not to be stored."""


class StepLog:
    """The log of one response, as far as this process knows it."""

    def __init__(self, bus: Bus, tenant: str, response_id: str) -> None:
        self._bus = bus
        self.tenant = tenant
        self.response_id = response_id
        self.state = ResponseState(response_id)
        self.num_bytes = 0
        """Bytes of the steps that were read or appended."""
        self._last_sequence = 0
        self._appending = b""
        """The step that this process is appending, until it is known to be stored."""
        self.overtaken = False
        """Whether steps of others were read, which what is being done does not know of. Appends are
        refused until whoever plans anew sets it to False."""
        self._lock = asyncio.Lock()
        """Held during an append, which other tasks of this process may want as well."""
        self._append_to = subjects.step(tenant, response_id)
        self._read_from = subjects.steps(tenant, response_id)

    async def refresh(self, max_bytes: int | None = None) -> list[Step]:
        """Apply the steps that are new in the log, and return them.

        Raises PayloadTooLarge for more than `max_bytes`, and Unavailable.
        """
        stored = await self._bus.read(
            subjects.STEPS_STREAM, self._read_from, self._last_sequence + 1, max_bytes
        )
        return [step for message in stored if (step := self.accept(message)) is not None]

    def accept(self, message: StoredMessage) -> Step | None:
        """Apply a message of the log that was read live.

        None for one that is not the next step, or that is being appended here. Bytes that are no
        step, and steps of a newer version, are skipped.
        """
        if message.sequence <= self._last_sequence:
            return None
        step = decode_step(message.data)
        if step is not None and step.index > self.state.num_steps:
            return None  # Steps before it were missed.
        self._last_sequence = message.sequence
        self.num_bytes += len(message.data)
        if step is None or step.index < self.state.num_steps:
            return None
        try:
            self.state.apply(step)
        except (AssertionError, LookupError) as error:
            raise DecodeError(
                f"the steps of {self.response_id} do not follow from each other"
            ) from error
        if message.data == self._appending:
            self._appending = b""
            return None
        return step

    async def append(self, step: Step) -> Step:
        """Append a step, whose index is set here, and apply it.

        Raises Fenced when another writer was faster; the log is then refreshed, and `overtaken`.
        Raises Overloaded when the store is full.
        """
        async with self._lock:
            return await self._append(step)

    async def _append(self, step: Step) -> Step:
        if self.overtaken:
            raise Fenced(f"another worker writes the steps of {self.response_id}")
        step = replace(step, index=self.state.num_steps)
        data = self._appending = to_json(step)
        begun = step if isinstance(step, Begun) else self.state.begun
        ttl_s = None if begun is not None and begun.store else UNSTORED_TTL_S
        try:
            sequence = await self._bus.append(self._append_to, data, self._last_sequence, ttl_s)
        except Fenced:
            # The append may be stored although its ack was lost.
            # Other tasks may wait to append what was planned before.
            self.overtaken = bool(await self.refresh()) or self.overtaken
            if self._appending:
                raise
            return step
        if self._appending:  # It was not read live yet.
            self._last_sequence = sequence
            self.num_bytes += len(data)
            self.state.apply(step)
        self._appending = b""
        return step

    async def follow(self) -> AsyncIterator[Step]:
        """Yield all further steps, to the end of the response."""
        async with self.watch() as watch:
            while self.state.ended is None:
                for step in await watch.next():
                    yield step
                    if isinstance(step, Ended):
                        return

    @asynccontextmanager
    async def watch(self) -> AsyncIterator["StepWatch"]:
        live = await self._bus.subscribe(self._read_from)
        try:
            yield StepWatch(self, live)
        finally:
            await self._bus.unsubscribe(live)

    async def is_gone(self) -> bool:
        """Return whether the log has been removed. Raises Unavailable."""
        return not await self._bus.has_messages(subjects.STEPS_STREAM, self._read_from)

    async def delete(self) -> None:
        """Remove the log. Raises Unavailable."""
        await self._bus.purge(subjects.STEPS_STREAM, self._read_from)


class StepWatch:
    """Reads the new steps of one log, live or from the stream."""

    def __init__(self, log: StepLog, live: LiveSubscription) -> None:
        self._log = log
        self._live = live
        self._silence_s = 0.0

    async def next(self) -> list[Step]:
        """Return new steps; none after a silence without any."""
        live = await self._live.next(self._silence_s) if self._silence_s else None
        if live is not None and (step := self._log.accept(live)) is not None:
            self._silence_s = SILENCE_S
            self._log.overtaken = True
            return [step]
        new = await self._log.refresh()
        self._log.overtaken = self._log.overtaken or bool(new)
        grown = min(max(2 * self._silence_s, SILENCE_S), MAX_SILENCE_S)
        self._silence_s = SILENCE_S if new or live is not None else grown
        return new


async def open_log(
    bus: Bus, tenant: str, response_id: str, max_bytes: int | None = None
) -> StepLog:
    """Return the log of a response with all its steps; it has none if there is no response.

    Raises PayloadTooLarge for more than `max_bytes`, and Unavailable.
    """
    log = StepLog(bus, tenant, response_id)
    await log.refresh(max_bytes)
    return log


async def open_conversation(
    bus: Bus, tenant: str, response_ids: Sequence[str], max_bytes: int
) -> AsyncIterator[StepLog]:
    """Yield the logs of responses that continue each other.

    Raises NotFound for a response that is deleted, ContextTooLong when the logs together have more
    than `max_bytes`, and Unavailable.
    """
    left = max_bytes
    for first in range(0, len(response_ids), READ_AT_ONCE):
        reads = [open_log(bus, tenant, name, left) for name in response_ids[first:][:READ_AT_ONCE]]
        try:
            logs = await asyncio.gather(*reads)
            left -= sum(log.num_bytes for log in logs)
            if left < 0:
                raise PayloadTooLarge("the logs are too large together")
        except PayloadTooLarge as error:
            raise ContextTooLong(
                f"the responses that this one continues have more than {max_bytes} bytes",
                field=PREVIOUS,
            ) from error
        for log in logs:
            if log.state.begun is None:
                raise NotFound("a response that this one continues is deleted", field=PREVIOUS)
            yield log
