"""Consumer of the slots of a stage: one credit for the queues of all slots of a lane.

Each worker pulls from every slot, and the broker serves pulls by priority, usually the pulls of the
slot's owner first. A message that the owner does not pull goes at once to any worker with room.

A queue that may have messages gets a pull within the credit, which the broker answers at once. An
empty queue gets a waiting pull for one message, beyond the credit, because there are many queues
and most of them are empty. Messages that are delivered beyond the credit are requeued.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import api

from shared.bus.connection import CorrectedClient
from shared.bus.consumer import PULL_REFUSED_PAUSE_S, AckBatcher, Delivery, Puller, pull_subject
from shared.bus.outages import Outages
from shared.bus.priorities import BUSY, priority_of
from shared.helpers.task_set import TaskSet
from shared.protocol.encoding import to_json

GROUP = "slots"
# The priority of a pull cannot be changed. So pulls are short, especially for a busy worker, which
# may be idle soon.
WAIT_S, BUSY_WAIT_S = 1.0, 0.25
# An owner renews its pull before the broker ends the last one, so that no other worker is served
# between them.
RENEWED_AT = 0.5
# After this part of its time, a pull counts as lost together with the leader of its consumer.
LOST_AT = 1.5
# Number of messages in a waiting pull of an owner, so that it also gets one that follows at once.
OWNED_BATCH = 2
LEAST_PAUSE_S = 0.1


class SlotQueue(NamedTuple):
    """Queue of a slot of a lane."""

    slot: int | None
    """None for the queue of tasks without a slot, which has no priorities."""
    durable: str
    subject: str


@dataclass
class PrioritizedConfig(api.ConsumerConfig):
    """Configuration of a consumer with priorities of pulls, which nats-py does not support."""

    priority_groups: list[str] = field(default_factory=lambda: [GROUP])
    priority_policy: str = "prioritized"


@dataclass(eq=False)
class _Queue:
    """State of a queue, which has one pull of this worker at a time."""

    slot: int | None
    durable: str
    pull_subject: str
    acks: AckBatcher
    is_owned: bool
    backlog: int | None = None
    """Number of messages in the queue; None if it is unknown."""
    pull: int = 0
    """Number of the last pull."""
    num_requested: int = 0
    """Number of messages that the last pull may still deliver."""
    waits: bool = False
    """Whether the last pull waits for messages."""
    due_s: float = 0.0
    """Loop time of the next pull; 0 after the end of the last one."""

    def end_pull(self, backlog: int | None, due_s: float = 0.0) -> None:
        self.num_requested, self.backlog, self.due_s = 0, backlog, due_s


class SlotConsumer(Puller):
    """Pulls from the queues of all slots. This worker owns some of them."""

    def __init__(
        self,
        nc: CorrectedClient,
        stream: str,
        queues: Iterable[SlotQueue],
        capacity: int,
        load: Callable[[], float],
        outages: Outages,
    ) -> None:
        """`load` returns the load of this worker, see `priorities`."""
        super().__init__(nc, stream, capacity, outages)
        self._load = load
        self.queues = {
            queue.durable: _Queue(
                queue.slot,
                queue.durable,
                pull_subject(stream, queue.durable),
                AckBatcher(nc),
                is_owned=queue.slot is None,
            )
            for queue in queues
        }
        self._requeues = TaskSet()

    def set_owned(self, slots: Collection[int]) -> None:
        """Own these slots from the next pull on."""
        for queue in self.queues.values():
            queue.is_owned = queue.slot is None or queue.slot in slots

    def on_reconnect(self) -> None:
        for queue in self.queues.values():
            queue.end_pull(backlog=None)
        self._changed.set()

    def _receive(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status")
        if status is not None and not msg.reply:
            self._on_status(msg.subject.rpartition(".")[2], status)
        else:
            self._on_delivery(msg)
        self._changed.set()

    def _on_status(self, number: str, status: str) -> None:
        """End a pull, unless it was followed by another one."""
        for queue in self.queues.values():
            if queue.pull != int(number):
                continue
            if status in ("404", "408"):
                queue.end_pull(backlog=0)
                self.outages.add_answer(self.stream, queue.durable)
            else:
                now_s = asyncio.get_running_loop().time()
                queue.end_pull(backlog=None, due_s=now_s + PULL_REFUSED_PAUSE_S)
                self.outages.add_refusal(self.stream, queue.durable, status)

    def _on_delivery(self, msg: Msg) -> None:
        metadata = msg.metadata
        queue = self.queues[metadata.consumer]
        self.outages.add_answer(self.stream, queue.durable)
        queue.backlog = metadata.num_pending
        queue.num_requested -= 1
        if queue.num_requested <= 0:
            queue.end_pull(queue.backlog)
        self.num_in_flight += 1
        delivery = Delivery(msg, self, queue.acks)
        if self.num_in_flight > self.capacity:
            self._requeues.start(delivery.retry(0))
        else:
            self._ready.put_nowait(delivery)

    async def _pull_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            await self._pull_where_due(loop.time())
            due_s = min(queue.due_s for queue in self.queues.values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due_s - loop.time(), LEAST_PAUSE_S)):
                    await self._changed.wait()

    async def _pull_where_due(self, now_s: float) -> None:
        every = self.queues.values()
        due = [queue for queue in every if queue.due_s <= now_s]
        if self.num_in_flight >= self.capacity:
            for queue in due:
                # The queue may have messages by the time that there is room.
                queue.end_pull(queue.backlog or None)
            return
        open_pulls = (queue for queue in every if queue not in due and not queue.waits)
        num_requested = sum(queue.num_requested for queue in open_pulls)
        room = self.capacity - self.num_in_flight - num_requested
        for queue in sorted(due, key=_rank):
            if queue.backlog == 0:
                batch = OWNED_BATCH if queue.is_owned else 1
                await self._pull(queue, batch, now_s, waits=True)
            elif room > 0:
                # Messages of other owners are pulled one by one, so that an owner can come between.
                batch = min(room, queue.backlog or 1) if queue.is_owned else 1
                room -= batch
                await self._pull(queue, batch, now_s, waits=False)

    async def _pull(self, queue: _Queue, batch: int, now_s: float, *, waits: bool) -> None:
        self.num_pulls += 1
        load = self._load()
        wait_s = WAIT_S if load <= BUSY else BUSY_WAIT_S
        queue.pull, queue.num_requested, queue.waits = self.num_pulls, batch, waits
        queue.due_s = now_s + wait_s * (RENEWED_AT if queue.is_owned else LOST_AT)
        request: dict[str, object] = {"batch": batch}
        request |= {"expires": int(wait_s * 1e9)} if waits else {"no_wait": True}
        if queue.slot is not None:
            priority = priority_of(load, is_owner=queue.is_owned)
            request |= {"group": GROUP, "priority": priority}
        reply = f"{self._inbox}.{queue.pull}"
        try:
            await self._nc.publish(queue.pull_subject, to_json(request), reply=reply)
        except NatsError:
            # Not connected: `on_reconnect` causes another pull.
            queue.end_pull(backlog=None, due_s=queue.due_s)


def _rank(queue: _Queue) -> tuple[bool, bool, int]:
    """Sort key of queues: queues with a backlog first, then owned ones, then the oldest pull."""
    return not queue.backlog, not queue.is_owned, queue.pull
