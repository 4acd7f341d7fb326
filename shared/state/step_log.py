"""Logs of steps: one subject per response, append-only, fenced, readable from the beginning.

A writer must have read all earlier steps. If another writer has appended meanwhile, the server
refuses the append. The writer then reads the new steps and plans again.
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

# Live steps may be lost, so the log is read after this silence.
SILENCE_S = 2.0
READ_AT_ONCE = 8
PREVIOUS = "previous_response_id"
MAX_SILENCE_S = 15.0
UNSTORED_TTL_S = 3600.0
"""Time for which the steps of a response with `store: false` are stored."""


class StepLog:
    """Log of one response, up to the last step that this process has read."""

    def __init__(self, bus: Bus, tenant: str, response_id: str) -> None:
        self._bus = bus
        self.tenant = tenant
        self.response_id = response_id
        self.state = ResponseState(response_id)
        self.num_bytes = 0
        """Total size of the steps that were read or appended."""
        self._last_sequence = 0
        self._appending = b""
        """Step that this process is appending, until it is acknowledged."""
        self.overtaken = False
        """Whether steps of another worker were read since the last plan. Appends are refused until
        the caller has planned again and sets it to False."""
        self._lock = asyncio.Lock()
        """Held during an append, because several tasks of this process may append."""
        self._append_to = subjects.step(tenant, response_id)
        self._read_from = subjects.steps(tenant, response_id)

    async def refresh(self, max_bytes: int | None = None) -> list[Step]:
        """Apply the new steps of the log, and return them.

        Raises PayloadTooLarge for more than `max_bytes`, and Unavailable.
        """
        stored = await self._bus.read(
            subjects.STEPS_STREAM, self._read_from, self._last_sequence + 1, max_bytes
        )
        return [step for message in stored if (step := self.accept(message)) is not None]

    def accept(self, message: StoredMessage) -> Step | None:
        """Apply a live message of the log, and return its step.

        Return None for a message that is not the next step, or that this process is appending.
        Undecodable messages and steps of a newer version are skipped.
        """
        if message.sequence <= self._last_sequence:
            return None
        step = decode_step(message.data)
        if step is not None and step.index > self.state.num_steps:
            return None  # Earlier steps were missed.
        self._last_sequence = message.sequence
        self.num_bytes += len(message.data)
        if step is None or step.index < self.state.num_steps:
            return None
        try:
            self.state.apply(step)
        except (AssertionError, LookupError) as error:
            raise DecodeError(f"the steps of {self.response_id} are not consecutive") from error
        if message.data == self._appending:
            self._appending = b""
            return None
        return step

    async def append(self, step: Step) -> Step:
        """Set the index of a step, append the step, and apply it.

        Raises Fenced if another writer has appended before; the log is then refreshed, and
        `overtaken` is set. Raises Overloaded if the stream is full.
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
            # The step may be stored although its ack was lost. Otherwise tasks that wait to append
            # have planned without the new steps.
            self.overtaken = bool(await self.refresh()) or self.overtaken
            if self._appending:
                raise
            return step
        if self._appending:  # The live message has not been read yet.
            self._last_sequence = sequence
            self.num_bytes += len(data)
            self.state.apply(step)
        self._appending = b""
        return step

    async def follow(self) -> AsyncIterator[Step]:
        """Yield all further steps, up to the end of the response."""
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
    """Reader of the new steps of one log, live or from the stream."""

    def __init__(self, log: StepLog, live: LiveSubscription) -> None:
        self._log = log
        self._live = live
        self._silence_s = 0.0

    async def next(self) -> list[Step]:
        """Wait for new steps and return them; the list is empty if none arrive for some time."""
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
    """Return the log of a response with all its steps; without a response it is empty.

    Raises PayloadTooLarge for more than `max_bytes`, and Unavailable.
    """
    log = StepLog(bus, tenant, response_id)
    await log.refresh(max_bytes)
    return log


async def open_conversation(
    bus: Bus, tenant: str, response_ids: Sequence[str], max_bytes: int, field: str = PREVIOUS
) -> AsyncIterator[StepLog]:
    """Yield the logs of the responses that a new response continues.

    `field` is the client's field with their ids, for errors. Raises NotFound for a deleted
    response, ContextTooLong if the logs together exceed `max_bytes`, and Unavailable.
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
                field=field,
            ) from error
        for log in logs:
            if log.state.begun is None:
                raise NotFound("a response that this one continues is deleted", field=field)
            yield log
