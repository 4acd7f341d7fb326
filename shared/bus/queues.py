"""Consumers of queues: created, joined, and created again after a broker has lost the tasks."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import structlog
from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from shared.bus.connection import (
    BROKER_DEADLINE_S,
    MAX_RETRY_S,
    REPLY_TIMEOUT_S,
    Connection,
    is_denied,
    retry_until,
)
from shared.bus.consumer import Consumer, Puller
from shared.bus.outages import Outages
from shared.bus.slot_consumer import PrioritizedConfig, SlotConsumer, SlotQueue
from shared.bus.stream_keeper import StreamKeeper
from shared.errors import PagemillError, Unavailable
from shared.helpers.task_set import run_for_each
from shared.protocol import subjects

# Limit on the waiting pull requests of one consumer. Each worker has up to three of them, so the
# server's default of 512 would refuse a few hundred workers.
MAX_WAITING_PULLS = 20_000

# In a cluster each consumer elects a leader first.
CREATED_AT_ONCE = 16

# Key in a consumer's metadata: first sequence of the stream of tasks that it feeds.
_FED = "pagemill.tasks"

_log = structlog.get_logger()

AnyPuller = TypeVar("AnyPuller", bound=Puller)


class _Queue(NamedTuple):
    """Durable consumer that this worker has created or joined."""

    stream: str
    durable: str
    subject: str
    ack_wait_s: float
    is_prioritized: bool
    feeds_tasks: bool


class Queues:
    """Creates consumers and pulls from them, and creates again what a broker has lost."""

    def __init__(self, connection: Connection, streams: StreamKeeper) -> None:
        self._connection = connection
        self._nc, self._js = connection.nc, connection.js
        self._streams = streams
        self._consumers: list[Puller] = []
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._on_tasks_lost: list[Callable[[], None]] = []
        self.outages = Outages(self._on_refused)
        self._refilled_ms = 0.0
        """Time when a lost consumer that feeds tasks was created again. Since then it redelivers
        older messages as new ones."""
        self._has_queues = True
        """False until consumers that were lost with their tasks are created again."""
        self._restoring: asyncio.Task[None] | None = None
        self._is_stale = False
        """Whether streams or consumers may be missing."""
        self._restore_again_s = 0.0
        """When they may be looked for again, by the clock of the event loop."""
        self._closing = False

    async def create(
        self,
        stream: str,
        durable: str,
        subject: str,
        ack_wait_s: float,
        *,
        is_prioritized: bool = False,
        feeds_tasks: bool = False,
    ) -> None:
        """Create the durable consumer `durable`, or update it if it exists.

        If it `is_prioritized`, its pulls have priorities. If it `feeds_tasks`, its messages become
        tasks. If the stream of tasks that it has fed is lost, the consumer is reset: all of its
        messages are delivered again, and the tasks are published again. Raises Unavailable if the
        broker does not answer within BROKER_DEADLINE_S.
        """
        queue = _Queue(stream, durable, subject, ack_wait_s, is_prioritized, feeds_tasks)
        self._queues[stream, durable] = queue
        await retry_until(
            BROKER_DEADLINE_S,
            lambda: self._create_or_update(queue),
            (NatsError, Unavailable),
            f"the broker did not create consumer {durable}",
        )

    async def _create_or_update(self, queue: _Queue) -> None:
        make = PrioritizedConfig if queue.is_prioritized else api.ConsumerConfig
        config = make(
            durable_name=queue.durable,
            filter_subject=queue.subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=queue.ack_wait_s,
            # Workers count attempts, because they can write a dead letter. With a limit here, the
            # message would silently stay in the queue forever.
            max_deliver=-1,
            # Credit limits the messages in flight of each worker. With a common limit, one worker
            # could starve the others.
            max_ack_pending=-1,
            max_waiting=MAX_WAITING_PULLS,
            metadata={_FED: str(self._streams.tasks.first_sequence)} if queue.feeds_tasks else None,
        )
        try:
            existing = await self._js.consumer_info(queue.stream, queue.durable)
        except NotFoundError:
            await self._js.add_consumer(queue.stream, config)
            return
        if queue.stream != subjects.STAGES_STREAM and existing.ack_floor is not None:
            await self._remove_acknowledged(queue, existing.ack_floor.stream_seq)
        if queue.feeds_tasks:
            await self._reset_if_fed_another(queue, existing.config.metadata or {})
        # The server refuses to change this limit.
        max_waiting = existing.config.max_waiting
        await self._js.add_consumer(queue.stream, config.evolve(max_waiting=max_waiting))

    async def _remove_acknowledged(self, queue: _Queue, last_sequence: int) -> None:
        """Remove messages up to `last_sequence`, which have all been acknowledged.

        A broker with a full disk may store an acknowledgement, and fail to remove the message. It
        does not deliver the message again, which would keep its place forever.
        """
        info = await self._js.stream_info(queue.stream)
        if info.config.retention != api.RetentionPolicy.WORK_QUEUE:
            return  # The messages of other streams stay.
        state = info.state
        is_permitted = not is_denied(self._nc, f"$JS.API.STREAM.PURGE.{queue.stream}")
        if state.messages and state.first_seq <= last_sequence and is_permitted:
            _log.warning("acknowledged_messages_removed", stream=queue.stream)
            await self._js.purge_stream(queue.stream, last_sequence + 1, queue.subject)

    async def _reset_if_fed_another(self, queue: _Queue, metadata: Mapping[str, str]) -> None:
        """Make the server deliver all messages again if their tasks are lost.

        A consumer without the metadata key has fed the stream of an older version, which is on
        disk.
        """
        if metadata.get(_FED, "0") == str(self._streams.tasks.first_sequence):
            return
        _log.warning("tasks_lost", stream=queue.stream, consumer=queue.durable)
        # A reset has the same effect as a new consumer. If a consumer is deleted and recreated at
        # once, nats-server 2.15.1 may later delete the files of the new one.
        subject = f"$JS.API.CONSUMER.RESET.{queue.stream}.{queue.durable}"
        reply = json.loads((await self._nc.request(subject, timeout=REPLY_TIMEOUT_S)).data)
        if "error" in reply:
            raise Unavailable(f"consumer {queue.durable} was not reset: {reply['error']}")

    async def consume(
        self,
        stream: str,
        durable: str,
        subject: str,
        capacity: int,
        ack_wait_s: float,
        *,
        feeds_tasks: bool = False,
    ) -> Consumer:
        """Create the durable consumer `durable` like `create`, and join it.

        Raises Unavailable if the broker does not answer within BROKER_DEADLINE_S.
        """
        await self.create(stream, durable, subject, ack_wait_s, feeds_tasks=feeds_tasks)
        return await self._start(Consumer(self._nc, stream, durable, capacity, self.outages))

    async def leave(self, consumer: Consumer) -> None:
        """Stop pulling from the queue of a removed stream, and do not create it again."""
        self._consumers.remove(consumer)
        self._queues.pop((consumer.stream, consumer.durable), None)
        self.outages.forget(consumer.stream, consumer.durable)
        await consumer.stop()

    async def create_slots(
        self, stream: str, queues: Sequence[SlotQueue], ack_wait_s: float
    ) -> None:
        """Create the consumers of `queues`, like `create`, several at a time."""

        def create(queue: SlotQueue) -> Awaitable[None]:
            is_prioritized = queue.slot is not None
            return self.create(
                stream, queue.durable, queue.subject, ack_wait_s, is_prioritized=is_prioritized
            )

        await run_for_each(create, queues, CREATED_AT_ONCE)

    async def consume_slots(
        self,
        stream: str,
        queues: Sequence[SlotQueue],
        capacity: int,
        ack_wait_s: float,
        load: Callable[[], float],
    ) -> SlotConsumer:
        """Join the consumers of all `queues`, like `consume`, with one capacity for all."""
        await self.create_slots(stream, queues, ack_wait_s)
        consumer = SlotConsumer(self._nc, stream, queues, capacity, load, self.outages)
        return await self._start(consumer)

    async def _start(self, consumer: AnyPuller) -> AnyPuller:
        self._consumers.append(consumer)
        await consumer.start()
        return consumer

    def on_tasks_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a single broker has lost all tasks in its memory."""
        self._on_tasks_lost.append(callback)

    def check(self) -> None:
        """Look for streams and consumers that are missing, and create them again."""
        self._is_stale = True
        if self._streams.is_prepared and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.create_task(self._restore_until_done())

    def on_reconnect(self) -> None:
        """Restore what the server loses with a connection."""
        for consumer in self._consumers:
            consumer.on_reconnect()
        self._on_refused()

    async def close(self) -> None:
        """Stop the consumers."""
        self._closing = True
        if self._restoring is not None:
            self._restoring.cancel()
        for consumer in self._consumers:
            await consumer.stop()

    async def _restore_until_done(self) -> None:
        # A single broker restarts without its in-memory streams, and the consumers of these.
        logged, loop = "", asyncio.get_running_loop()
        while self._is_stale and not self._closing:
            await asyncio.sleep(self._restore_again_s - loop.time())
            self._restore_again_s = loop.time() + MAX_RETRY_S
            self._is_stale = False
            try:
                await self.restore()
                if self._is_stale:
                    self._doubt_tasks()
            except (NatsError, PagemillError) as error:
                self._is_stale = True
                if (reason := str(error) or type(error).__name__) != logged:
                    _log.warning("streams_not_restored", error=reason)
                    logged = reason

    async def restore(self) -> None:
        """Create the streams and consumers that were deleted, or lost with a broker's memory.

        Raises NotFoundError until a coordinator has created the stream of tasks.
        """
        await self._streams.restore()
        before, tasks = self._streams.tasks, await self._streams.find_tasks()
        self._streams.tasks = tasks._replace(since_ms=math.inf)
        if tasks.first_sequence != before.first_sequence:
            self._has_queues = False
            self._forget_tasks()
        # Consumers that feed tasks come first: until they are reset, they may deliver old messages.
        for feeds_tasks in (True, False):
            queues = [q for q in self._queues.values() if q.feeds_tasks == feeds_tasks]
            await run_for_each(self._restore_queue, queues, CREATED_AT_ONCE)
        self._has_queues = True
        self._streams.tasks = tasks._replace(since_ms=max(tasks.since_ms, self._refilled_ms))

    async def _restore_queue(self, queue: _Queue) -> None:
        is_refused = self.outages.is_refused(queue.stream, queue.durable)
        if is_refused or not self._has_queues:
            await self._create_or_update(queue)
        if is_refused and queue.feeds_tasks:
            self._refilled_ms = self._connection.now_ms()

    def _on_refused(self) -> None:
        self._doubt_tasks()
        self.check()

    def _doubt_tasks(self) -> None:
        # Tasks may be lost; until that is known, no request counts as one that is new.
        self._streams.tasks = self._streams.tasks._replace(since_ms=math.inf)

    def _forget_tasks(self) -> None:
        for consumer in self._consumers:
            if consumer.stream == subjects.STAGES_STREAM:
                consumer.first_sequence = self._streams.tasks.first_sequence
        for callback in self._on_tasks_lost:
            callback()
