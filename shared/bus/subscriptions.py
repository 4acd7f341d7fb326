"""What comes live from the broker: messages of a subject, and questions to answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.bus.stored import StoredMessage, to_stored_message
from shared.protocol.messages import TENANT_HEADER

# Live messages that wait for a slow reader; what does not fit it finds in the stream.
MAX_UNREAD_MESSAGES = 4096

Responder = Callable[[bytes, str | None], Awaitable[bytes]]
"""To a question and its TENANT_HEADER, if it has one."""


class LiveSubscription:
    """A live subscription. It may lose messages when read slowly; the stream has them all."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._unread: asyncio.Queue[StoredMessage | None] = asyncio.Queue(MAX_UNREAD_MESSAGES)

    async def receive(self, msg: Msg) -> None:
        if "Nats-Sequence" not in (msg.headers or {}):
            # As it was published, and perhaps not stored yet.
            self.wake()
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._unread.put_nowait(to_stored_message(msg))

    def wake(self) -> None:
        """Have the reader look into the stream: something may have been missed."""
        with contextlib.suppress(asyncio.QueueFull):
            self._unread.put_nowait(None)

    async def next(self, timeout_s: float) -> StoredMessage | None:
        """The next message, or None after `timeout_s` of silence or a `wake`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._unread.get()
        except TimeoutError:
            return None


class GroupResponder:
    """A part of the questions on a subject."""

    def __init__(self, answer: Responder) -> None:
        self.subscription: Subscription | None = None
        self._answer = answer
        self._answering: set[asyncio.Task[None]] = set()

    async def receive(self, msg: Msg) -> None:
        task = asyncio.create_task(self._respond(msg))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def stop(self, timeout_s: float) -> None:
        """Leave new questions to the others, and answer those that are there already."""
        if self.subscription is not None:
            with contextlib.suppress(NatsError):
                await self.subscription.unsubscribe()
        if self._answering:
            _, late = await asyncio.wait(self._answering, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _respond(self, msg: Msg) -> None:
        # Who does not get an answer asks again, or somebody else.
        with contextlib.suppress(NatsError):
            tenant = (msg.headers or {}).get(TENANT_HEADER)
            await msg.respond(await self._answer(bytes(msg.data), tenant))
