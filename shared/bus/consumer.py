"""Taking work from a queue: pull with credit, and settle what is in hand.

The half of the bus that workers listen with; `shared.bus.bus` has the connection and all the rest.
"""

import asyncio
import contextlib
import json
from collections import OrderedDict

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.protocol.messages import TENANT_HEADER

ACK = b"+ACK"
ACK_TIMEOUT_S = 2.0
ACK_ATTEMPTS = 3
# During an election the server says at once that nobody is there.
ACK_PAUSE_S = 0.2

# A pull request that is lost with the leader of its consumer is missed only when it has expired.
PULL_EXPIRES_S = 5.0
# No leader, no stream: asking again at once would only keep both ends busy.
PULL_REFUSED_PAUSE_S = 0.25
# What may wait in the client for its turn; a picture has megabytes, and what is over the library's
# limit of 128 MiB it drops.
PENDING_BYTES = 2**30

_log = structlog.get_logger()


class Delivery:
    """One message in hand, to be settled once: `ack`, `retry`, or `abandon`, which leaves it.

    Once it is settled, or is being settled, all of them do nothing.
    """

    def __init__(self, msg: Msg, consumer: "Consumer") -> None:
        self._msg = msg
        self._consumer = consumer
        self._settled = False
        self.subject = msg.subject
        self.data = msg.data
        headers = msg.headers or {}
        self.msg_id = headers.get("Nats-Msg-Id")
        self.tenant = headers.get(TENANT_HEADER)
        """Of a client's request; whatever the publisher has written there."""
        self.attempt = msg.metadata.num_delivered
        """Counts deliveries from 1."""
        self.sequence = msg.metadata.sequence.stream
        self.stored_ms = msg.metadata.timestamp.timestamp() * 1000
        self.receipt = msg.reply
        """With it anybody may acknowledge this message, see `Bus.acknowledge`."""

    async def ack(self) -> None:
        """Returns when the server has it. If the server stays silent the message comes again."""
        if self._settled:
            return
        self._settled = True
        try:
            if not await self._consumer.acks.send(self.receipt):
                _log.warning("ack_unconfirmed", subject=self.subject)
        finally:
            self._consumer.settled()

    async def retry(self, after_s: float) -> None:
        """Give the message back; anyone may have it after `after_s`.

        If the server does not hear of it, the message comes again after its ack wait.
        """
        if self._settled:
            return
        self._settled = True
        try:
            # A plain nak would come back within a millisecond, whatever the consumer's back-off.
            await self._msg.nak(delay=max(after_s, 0.001))
        except NatsError as error:
            # Its text may hold the whole message.
            _log.warning("nak_unsent", subject=self.subject, error=type(error).__name__)
        finally:
            self._consumer.settled()

    async def progress(self) -> None:
        """Restart the ack wait: the work is advancing. Without a server there is nobody to tell."""
        if not self._settled:
            with contextlib.suppress(NatsError):
                await self._msg.in_progress()

    def abandon(self) -> None:
        """Stop working on it without a word: another worker has it, or will after the ack wait."""
        if not self._settled:
            self._settled = True
            self._consumer.settled()


async def acknowledge(nc: NatsClient, receipt: str) -> bool:
    """Returns whether the server has confirmed it."""
    for _ in range(ACK_ATTEMPTS):
        with contextlib.suppress(NatsError):
            await nc.request(receipt, ACK, timeout=ACK_TIMEOUT_S)
            return True
        await asyncio.sleep(ACK_PAUSE_S)
    return False


class AckBatcher:
    """Acknowledges in groups, one group after another: the answer to the last confirms them all.

    For one consumer, whose acknowledgements the server takes in the order of the connection. Those
    of a group that was not confirmed are sent again one by one; to do so twice does no harm. When
    the consumer's leader changes amid a group its first ones may be lost all the same: their jobs
    come again after the ack wait, to somebody who finds them done.
    """

    def __init__(self, nc: NatsClient) -> None:
        self._nc = nc
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._sender: asyncio.Task[None] | None = None

    async def send(self, receipt: str) -> bool:
        """Returns whether the server has confirmed it."""
        in_group: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[receipt] = in_group
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_groups())
        # A server that was killed may not know any more that it has delivered one of the group, and
        # then says nothing.
        return await in_group or await acknowledge(self._nc, receipt)

    async def _send_groups(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, {}
                confirmed = await self._confirm(list(group))
                for in_group in group.values():
                    if not in_group.done():
                        in_group.set_result(confirmed)
        finally:
            self._sender = None

    async def _confirm(self, group: list[str]) -> bool:
        reconnects = self._nc.stats["reconnects"]
        try:
            for receipt in group[:-1]:
                await self._nc.publish(receipt, ACK)
            await self._nc.request(group[-1], ACK, timeout=ACK_TIMEOUT_S)
        except NatsError:
            return False
        return bool(self._nc.stats["reconnects"] == reconnects)


class Consumer:
    """Pulls from a durable consumer with credit: `capacity` bounds what is in hand or asked for.

    Pull requests are kept outstanding, so a message is delivered as soon as it is stored, and the
    next request leaves when half of the credit is free.
    """

    def __init__(self, nc: NatsClient, stream: str, durable: str, capacity: int) -> None:
        self.capacity = capacity
        self.acks = AckBatcher(nc)
        self._nc = nc
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = nc.new_inbox()
        self._ready: asyncio.Queue[Delivery] = asyncio.Queue()
        self._held = 0
        self._next_pull = 0
        # Pull request number → (messages still to come, loop time at which it has lapsed).
        self._pulls: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._nc.subscribe(
            f"{self._inbox}.*", cb=self._receive, pending_bytes_limit=PENDING_BYTES
        )
        self._pump = asyncio.create_task(self._keep_pulling())

    async def next(self) -> Delivery:
        return await self._ready.get()

    @property
    def held(self) -> int:
        """Deliveries that are not settled yet."""
        return self._held

    def set_capacity(self, capacity: int) -> None:
        if capacity != self.capacity:
            self.capacity = capacity
            self._changed.set()

    def settled(self) -> None:
        self._held -= 1
        self._changed.set()

    def reconnected(self) -> None:
        """The server forgets pull requests with the connection that made them."""
        self._pulls.clear()
        self._changed.set()

    async def stop(self) -> None:
        """No further message is taken; what was delivered but not begun is handed back.

        What has not been read from the connection yet comes again after its ack wait. A second call
        does nothing.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._pump is None:
            return
        self._pump.cancel()
        if not self._nc.is_closed:
            await subscription.unsubscribe()
        while not self._ready.empty():
            await self._ready.get_nowait().retry(0)

    async def _receive(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status")
        if status is not None and not msg.reply:
            # That pull request is over, whatever it still owed.
            self._pulls.pop(msg.subject.rpartition(".")[2], None)
            if status not in ("404", "408"):
                _log.warning("pull_refused", subject=self._subject, status=status)
                await asyncio.sleep(PULL_REFUSED_PAUSE_S)
        else:
            self._held += 1
            self._count_arrival()
            self._ready.put_nowait(Delivery(msg, self))
        self._changed.set()

    def _count_arrival(self) -> None:
        # The server serves pull requests in the order in which they came.
        if self._pulls:
            number, (remaining, lapse) = next(iter(self._pulls.items()))
            if remaining == 1:
                del self._pulls[number]
            else:
                self._pulls[number] = (remaining - 1, lapse)

    async def _keep_pulling(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            for number in [n for n, (_, lapse) in self._pulls.items() if lapse <= now]:
                del self._pulls[number]
            asked = sum(remaining for remaining, _ in self._pulls.values())
            free = self.capacity - self._held - asked
            if free > 0 and (asked == 0 or 2 * free >= self.capacity):
                await self._pull(free, now)
            try:
                async with asyncio.timeout(PULL_EXPIRES_S / 2):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _pull(self, batch: int, now: float) -> None:
        self._next_pull += 1
        number = str(self._next_pull)
        self._pulls[number] = (batch, now + PULL_EXPIRES_S + 1.0)
        request = {"batch": batch, "expires": int(PULL_EXPIRES_S * 1e9)}
        try:
            await self._nc.publish(
                self._subject, json.dumps(request).encode(), reply=f"{self._inbox}.{number}"
            )
        except NatsError:
            # Not connected: `reconnected` asks again.
            self._pulls.pop(number, None)
