"""Consumer of the slots of a stage: one credit for the queues of all slots of a lane.

Each worker pulls from every slot, and the broker serves pulls by their priority: mostly those of
the slot's owner, and those of idle workers before those of a busy owner. What nobody else pulls is
therefore taken at once by any worker that has room, without a look at the length of the queue.

A queue is asked first by a pull that the broker answers at once, within the credit. An empty queue
gets a pull that waits, beyond the credit, because queues are many and most of them empty. What is
delivered beyond the credit is handed back.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import api

from shared.bus.consumer import PULL_REFUSED_PAUSE_S, AckBatcher, Delivery, Puller, pull_subject

GROUP = "slots"
NUM_PRIORITIES = 10
# Priority of the pulls of an idle worker that is not the owner.
FIRST_THIEF = 5

# The priority of a pull cannot be changed, so that pulls are short.
WAIT_S = 1.0
# By then the broker has ended a pull, or has lost it with the leader of its consumer.
LAPSE_S = 2.0
# Messages that an owner asks for at a time: those that follow at once must not go to others.
OWNED_BATCH = 4

_log = structlog.get_logger()


class SlotQueue(NamedTuple):
    """The queue of a slot of a lane."""

    slot: int | None
    """None for the queue of tasks without a slot, which has no priorities."""
    durable: str
    subject: str


@dataclass
class PrioritizedConfig(api.ConsumerConfig):
    """Configuration of a consumer whose pulls have priorities, which nats-py does not know."""

    priority_groups: list[str] = field(default_factory=lambda: [GROUP])
    priority_policy: str = "prioritized"


def priority_of(load: float, *, is_owner: bool) -> int:
    """Return the priority of a pull; the lowest is served first.

    `load` is the part of a worker that is in use. An owner in half use stands behind idle workers.
    """
    load = min(1.0, max(0.0, load))
    if is_owner:
        return min(NUM_PRIORITIES - 1, int(NUM_PRIORITIES * load))
    num_levels = NUM_PRIORITIES - FIRST_THIEF
    return FIRST_THIEF + min(num_levels - 1, int(num_levels * load))


@dataclass(eq=False)
class _Queue:
    """What a worker knows of a queue, from which it has one pull at a time."""

    slot: int | None
    pull_subject: str
    acks: AckBatcher
    is_owned: bool
    is_empty: bool = False
    """Known from the end of the last pull, and only until the next one is due."""
    remaining: int = 0
    """Messages that the pull may still deliver; 0 without a pull."""
    waits: bool = False
    """Whether the pull is one that waits."""
    lapses_s: float = 0.0
    asks_from_s: float = 0.0
    """Loop time before which no pull is sent, because the broker has refused one."""

    def end_pull(self, *, is_empty: bool) -> None:
        self.remaining = 0
        self.is_empty = is_empty


class SlotConsumer(Puller):
    """Pulls from the queues of all slots, of which this worker owns some."""

    def __init__(
        self,
        nc: NatsClient,
        stream: str,
        queues: Iterable[SlotQueue],
        capacity: int,
        load: Callable[[], float],
    ) -> None:
        """`load` returns the part of this worker that is in use."""
        super().__init__(nc, capacity)
        self._load = load
        self._by_durable = {
            queue.durable: _Queue(
                queue.slot,
                pull_subject(stream, queue.durable),
                AckBatcher(nc),
                is_owned=queue.slot is None,
            )
            for queue in queues
        }
        self._by_pull: dict[str, _Queue] = {}
        self._handing_back: set[asyncio.Task[None]] = set()
        self._turn = 0

    def set_owned(self, slots: Collection[int]) -> None:
        """Own these slots from the next pull on."""
        for queue in self._by_durable.values():
            queue.is_owned = queue.slot is None or queue.slot in slots

    def on_reconnect(self) -> None:
        self._by_pull.clear()
        for queue in self._by_durable.values():
            queue.end_pull(is_empty=False)
        self._changed.set()

    async def _receive(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status")
        if status is not None and not msg.reply:
            self._on_status(msg.subject.rpartition(".")[2], status)
        else:
            self._on_delivery(msg)
        self._changed.set()

    def _on_status(self, number: str, status: str) -> None:
        """Note the end of a pull."""
        queue = self._by_pull.pop(number, None)
        if queue is None:
            return
        is_empty = status in ("404", "408")
        queue.end_pull(is_empty=is_empty)
        if not is_empty:
            queue.asks_from_s = asyncio.get_running_loop().time() + PULL_REFUSED_PAUSE_S
            _log.warning("pull_refused", subject=queue.pull_subject, status=status)

    def _on_delivery(self, msg: Msg) -> None:
        queue = self._by_durable[msg.metadata.consumer]
        queue.is_empty = False
        queue.remaining = max(0, queue.remaining - 1)
        self.num_in_flight += 1
        delivery = Delivery(msg, self, queue.acks)
        if self.num_in_flight > self.capacity:
            self._hand_back(delivery)
        else:
            self._ready.put_nowait(delivery)

    def _hand_back(self, delivery: Delivery) -> None:
        task = asyncio.create_task(delivery.retry(0))
        self._handing_back.add(task)
        task.add_done_callback(self._handing_back.discard)

    async def _pull_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now_s = loop.time()
            self._forget_lapsed(now_s)
            await self._pull_where_needed(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S / 4):
                    await self._changed.wait()

    def _forget_lapsed(self, now_s: float) -> None:
        for number, queue in [*self._by_pull.items()]:
            if queue.remaining == 0 or queue.lapses_s <= now_s:
                del self._by_pull[number]
                queue.remaining = 0

    async def _pull_where_needed(self, now_s: float) -> None:
        queues = self._by_durable.values()
        if self.num_in_flight >= self.capacity:
            for queue in queues:
                # It may have a message by the time that there is room.
                queue.is_empty = False
            return
        num_asked = sum(queue.remaining for queue in queues if not queue.waits)
        num_free = self.capacity - self.num_in_flight - num_asked
        for queue in self._in_turn():
            if queue.remaining or queue.asks_from_s > now_s:
                continue
            if queue.is_empty:
                batch = OWNED_BATCH if queue.is_owned else 1
                await self._pull(queue, min(batch, self.capacity), now_s, waits=True)
            elif num_free > 0:
                num_free -= 1
                await self._pull(queue, 1, now_s, waits=False)

    def _in_turn(self) -> list[_Queue]:
        """Return the queues, own slots first, and each time another of these first."""
        self._turn += 1
        queues = [*self._by_durable.values()]
        first = self._turn % len(queues)
        return sorted(queues[first:] + queues[:first], key=lambda queue: not queue.is_owned)

    async def _pull(self, queue: _Queue, batch: int, now_s: float, *, waits: bool) -> None:
        self._next_pull += 1
        number = str(self._next_pull)
        self._by_pull[number] = queue
        queue.remaining, queue.waits, queue.lapses_s = batch, waits, now_s + LAPSE_S
        request: dict[str, object] = {"batch": batch}
        request |= {"expires": int(WAIT_S * 1e9)} if waits else {"no_wait": True}
        if queue.slot is not None:
            priority = priority_of(self._load(), is_owner=queue.is_owned)
            request |= {"group": GROUP, "priority": priority}
        try:
            await self._nc.publish(
                queue.pull_subject, json.dumps(request).encode(), reply=f"{self._inbox}.{number}"
            )
        except NatsError:
            # Not connected: `on_reconnect` causes another pull.
            self._by_pull.pop(number, None)
            queue.end_pull(is_empty=False)
