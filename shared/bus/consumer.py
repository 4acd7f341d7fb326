"""Durable pull consumers: pull with credit, and settle the messages in flight."""

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.bus.connection import CorrectedClient
from shared.bus.outages import Outages
from shared.protocol import subjects
from shared.protocol.encoding import to_json

ACK = b"+ACK"
ACK_TIMEOUT_S = 2.0
ACK_ATTEMPTS = 3
# During an election the server reports at once that there is no responder.
ACK_PAUSE_S = 0.2

# A pull request that is lost with its consumer's leader is replaced only after it has expired.
PULL_EXPIRES_S = 5.0
# Without a leader or a stream, immediate retries would only keep client and server busy.
PULL_REFUSED_PAUSE_S = 0.25

_log = structlog.get_logger()


class Delivery:
    """Message in flight, which is settled once by `ack`, `retry` or `abandon`.

    As soon as one of these calls has begun, further calls do nothing.
    """

    def __init__(self, msg: Msg, puller: "Puller", acks: "AckBatcher") -> None:
        self._msg = msg
        self._puller = puller
        self._acks = acks
        self._settled = False
        self.subject = msg.subject
        self.data = msg.data
        headers = msg.headers or {}
        self.msg_id = headers.get("Nats-Msg-Id")
        self.tenant = subjects.tenant_of(msg.subject)
        """Unchecked tenant in the subject; "" without one."""
        self.headers = headers
        # `$JS.ACK.STREAM.CONSUMER.…`, or with a domain and an account before the stream.
        tokens = msg.reply.split(".")
        attempt, sequence, _, stored_ns = tokens[4:8] if len(tokens) == 9 else tokens[6:10]
        self.attempt = int(attempt)
        """Number of this delivery, counted from 1."""
        self.sequence = int(sequence)
        self.stored_ms = int(stored_ns) / 1e6
        self.receipt = msg.reply
        """Reply subject. With it, any worker can acknowledge the message by `Bus.acknowledge`."""

    @property
    def place(self) -> subjects.RequestPlace:
        """Place of the message in its stream."""
        return subjects.RequestPlace(self._puller.stream, self.sequence)

    @property
    def is_lost(self) -> bool:
        """Whether the broker has lost the message with its memory."""
        return self.sequence < self._puller.first_sequence

    async def ack(self) -> None:
        """Acknowledge the message, and wait until the server confirms it.

        Without a confirmation the message may be redelivered.
        """
        if self._settled:
            return
        self._settled = True
        try:
            # The server does not reply for a lost message.
            if not self.is_lost and not await self._acks.send(self.receipt):
                _log.warning("ack_unconfirmed", subject=self.subject)
        finally:
            self._puller.on_settled()

    async def retry(self, after_s: float) -> None:
        """Return the message to the queue, to be redelivered after `after_s`.

        If the server does not receive this, it redelivers the message after the ack wait.
        """
        if self._settled:
            return
        self._settled = True
        try:
            # After a nak without delay, the server redelivers within a millisecond, even if the
            # consumer has a back-off.
            await self._msg.nak(delay=max(after_s, 0.001))
        except NatsError as error:
            # The error's text may contain the whole message.
            _log.warning("nak_unsent", subject=self.subject, error=type(error).__name__)
        finally:
            self._puller.on_settled()

    async def progress(self) -> None:
        """Restart the ack wait, to report progress. Errors of the connection are ignored."""
        if not self._settled:
            with contextlib.suppress(NatsError):
                await self._msg.in_progress()

    def abandon(self) -> None:
        """Release the message without a report to the server.

        Another worker has the message, or gets it after the ack wait.
        """
        if not self._settled:
            self._settled = True
            self._puller.on_settled()


class AckBatcher:
    """Batches the acknowledgements of one consumer.

    The server processes acknowledgements in the order of the connection, so the reply to the last
    one of a batch confirms the whole batch. Acknowledgements of an unconfirmed batch are sent again
    one by one, which is idempotent. If the consumer's leader changes within a batch, the first ones
    may still be lost: their messages are redelivered after the ack wait, to a worker that finds
    their work done.

    Two deliveries may have the same receipt, because a killed broker repeats the numbers of
    deliveries that it has not stored.
    """

    def __init__(self, nc: CorrectedClient) -> None:
        self._nc = nc
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        self._sender: asyncio.Task[None] | None = None

    async def send(self, receipt: str) -> bool:
        """Send an acknowledgement. Return whether the server has confirmed it."""
        confirmation: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(receipt, []).append(confirmation)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_batches())
        # After a crash the server may not know the delivery of the batch's last message, and then
        # does not reply.
        return await confirmation or await self._send_alone(receipt)

    async def _send_alone(self, receipt: str) -> bool:
        for _ in range(ACK_ATTEMPTS):
            with contextlib.suppress(NatsError):
                await self._nc.request(receipt, ACK, timeout=ACK_TIMEOUT_S)
                return True
            await asyncio.sleep(ACK_PAUSE_S)
        return False

    async def _send_batches(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, {}
                confirmed = await self._send_batch(list(batch))
                for confirmation in itertools.chain.from_iterable(batch.values()):
                    if not confirmation.done():
                        confirmation.set_result(confirmed)
        finally:
            self._sender = None

    async def _send_batch(self, receipts: list[str]) -> bool:
        reconnects = self._nc.stats["reconnects"]
        try:
            for receipt in receipts[:-1]:
                await self._nc.publish(receipt, ACK)
            await self._nc.request(receipts[-1], ACK, timeout=ACK_TIMEOUT_S)
        except NatsError:
            return False
        return bool(self._nc.stats["reconnects"] == reconnects)


def pull_subject(stream: str, durable: str) -> str:
    """Subject of pull requests to a consumer."""
    return f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"


class Puller(ABC):
    """Base of consumers that pull messages with credit.

    `capacity` is the limit on messages in flight.
    """

    def __init__(self, nc: CorrectedClient, stream: str, capacity: int, outages: Outages) -> None:
        self.stream = stream
        self.outages = outages
        self.capacity = capacity
        self.first_sequence = 0
        """First sequence of the stream. Lower ones belong to an earlier stream of this name."""
        self._nc = nc
        self._inbox = nc.new_inbox()
        self._ready: asyncio.Queue[Delivery] = asyncio.Queue()
        self.num_in_flight = 0
        """Number of unsettled deliveries."""
        self.num_pulls = 0
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._nc.subscribe_direct(f"{self._inbox}.*", self._receive)
        self._pump = asyncio.create_task(self._pull_forever())

    async def next(self) -> Delivery:
        return await self._ready.get()

    def set_capacity(self, capacity: int) -> None:
        if capacity != self.capacity:
            self.capacity = capacity
            self._changed.set()

    def on_settled(self) -> None:
        """Count a delivery as settled, which frees credit."""
        self.num_in_flight -= 1
        self._changed.set()

    @abstractmethod
    def on_reconnect(self) -> None:
        """Send pull requests again, because the server drops them with their connection."""

    @abstractmethod
    def _receive(self, msg: Msg) -> None:
        """Handle a delivery, or the status that ends a pull request."""

    @abstractmethod
    async def _pull_forever(self) -> None:
        """Send pull requests after each change of the credit."""

    async def stop(self) -> None:
        """Stop pulling, and requeue delivered messages that `next` has not returned.

        Messages that were not read from the connection are redelivered after the ack wait. A second
        call does nothing.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._pump is None:
            return
        self._pump.cancel()
        if not self._nc.is_closed:
            await subscription.unsubscribe()
        while not self._ready.empty():
            await self._ready.get_nowait().retry(0)


class Consumer(Puller):
    """Pulls from a durable consumer.

    The capacity limits messages in flight and requested messages together. Pull requests stay
    outstanding, so that a message is delivered as soon as it is stored. The next request is sent
    when half of the credit is free.
    """

    def __init__(
        self, nc: CorrectedClient, stream: str, durable: str, capacity: int, outages: Outages
    ) -> None:
        super().__init__(nc, stream, capacity, outages)
        self.durable = durable
        self._acks = AckBatcher(nc)
        self._subject = pull_subject(stream, durable)
        # Pull request number → (outstanding messages, loop time at which the request has lapsed).
        self._pulls: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def on_reconnect(self) -> None:
        self._pulls.clear()
        self._changed.set()

    def _receive(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status")
        if status is not None and not msg.reply:
            # A status ends the pull request, even if messages are outstanding.
            self._pulls.pop(msg.subject.rpartition(".")[2], None)
            if status not in ("404", "408"):
                self.outages.add_refusal(self.stream, self.durable, status)
                loop = asyncio.get_running_loop()
                loop.call_later(PULL_REFUSED_PAUSE_S, self._changed.set)
                return
            self.outages.add_answer(self.stream, self.durable)
        else:
            self.outages.add_answer(self.stream, self.durable)
            self.num_in_flight += 1
            self._count_delivery()
            self._ready.put_nowait(Delivery(msg, self, self._acks))
        self._changed.set()

    def _count_delivery(self) -> None:
        # The server serves pull requests in the order of their arrival.
        if self._pulls:
            number, (remaining, lapse) = next(iter(self._pulls.items()))
            if remaining == 1:
                del self._pulls[number]
            else:
                self._pulls[number] = (remaining - 1, lapse)

    async def _pull_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            for number in [n for n, (_, lapse) in self._pulls.items() if lapse <= now]:
                del self._pulls[number]
            num_requested = sum(remaining for remaining, _ in self._pulls.values())
            free = self.capacity - self.num_in_flight - num_requested
            if free > 0 and (num_requested == 0 or 2 * free >= self.capacity):
                await self._pull(free, now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PULL_EXPIRES_S / 2):
                    await self._changed.wait()

    async def _pull(self, batch: int, now: float) -> None:
        self.num_pulls += 1
        number = str(self.num_pulls)
        self._pulls[number] = (batch, now + PULL_EXPIRES_S + 1.0)
        request: dict[str, object] = {"batch": batch}
        # After a refusal, a pull that does not wait shows at once whether the outage has ended.
        is_refused = self.outages.is_refused(self.stream, self.durable)
        request |= {"no_wait": True} if is_refused else {"expires": int(PULL_EXPIRES_S * 1e9)}
        try:
            await self._nc.publish(self._subject, to_json(request), reply=f"{self._inbox}.{number}")
        except NatsError:
            # Not connected: `on_reconnect` causes another pull.
            self._pulls.pop(number, None)
