"""The broker's side of a conversation: an event loop in a thread of its own.

The terminal belongs to the main thread, because only there Ctrl-C interrupts a line that the
user is typing. The connection needs a loop that runs meanwhile, or the broker would close it.
"""

import asyncio
import base64
import binascii
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from shared import client
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.protocol.records import LogRecord
from shared.protocol.requests import ContentPart, GenerateRequest, ImagePart, ImageURL, Message
from shared.state import request_status
from workers.cli.broker import CONNECT_TIMEOUT_S
from workers.cli.chat.answer import Answer
from workers.cli.chat.conversation import Conversation

T = TypeVar("T")


class Connection:
    """A connection for blocking callers."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        """Connect. Raises Unavailable."""
        self._thread.start()
        self._bus = self._run(Bus.connect(self._login, "chat", CONNECT_TIMEOUT_S))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._bus.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, which Ctrl-C cancels."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def read_answer(
        self,
        conversation: Conversation,
        answer: Answer,
        show: Callable[[str], None],
        *,
        is_new: bool,
    ) -> None:
        """Read the answer of the unfinished request to its end. Raises what `client.ask` raises.

        If the cluster knows the request, reading continues after the last record in `answer`. If
        not, the request is published, under the same id, so that it cannot be answered twice.
        `is_new` skips the look-up.
        """

        async def read() -> None:
            async for record in self._records(conversation, answer.next_index, is_new):
                show(answer.add(record))

        self._run(read())

    async def _records(
        self, conversation: Conversation, start: int, is_new: bool
    ) -> AsyncIterator[LogRecord]:
        request_id = conversation.unfinished
        assert request_id is not None
        if not is_new and await self._is_known(request_id):
            async for record in client.follow(self._bus, request_id, start):
                yield record
            return
        request = await _store_images(self._bus, conversation.request())
        sampling = conversation.params or None
        async for record in client.ask(self._bus, request, request_id, sampling=sampling):
            yield record

    async def _is_known(self, request_id: str) -> bool:
        return (await request_status.find(self._bus, request_id)).state != "unknown"

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Raises Unavailable."""
        self._run(client.cancel(self._bus, request_id))


async def _store_images(bus: Bus, request: GenerateRequest) -> GenerateRequest:
    """Return the request with stored images in place of `data:` URLs.

    A request holds all images of the conversation, which would not fit into a message as they are.
    """

    async def store(part: ContentPart) -> ContentPart:
        if not isinstance(part, ImagePart) or (data := _read_data(part.url)) is None:
            return part
        return ImagePart(ImageURL(await client.pin_media(bus, data), part.image_url.detail))

    async def with_stored(message: Message) -> Message:
        if not isinstance(message.content, list):
            return message
        return replace(message, content=[await store(part) for part in message.content])

    return replace(request, messages=[await with_stored(m) for m in request.messages or []])


def _read_data(url: str) -> bytes | None:
    """Return the bytes in a `data:` URL; None for any other URL, and for broken base64, which the
    server refuses."""
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:"):
        return None
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        return None
