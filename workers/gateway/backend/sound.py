"""Response with the sound of a request. It starts with the first samples."""

import base64
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.protocol.records import AnyRecord
from workers.gateway.app import AppContext
from workers.gateway.backend.active_request import ActiveRequest
from workers.gateway.core.byte_ranges import ByteRange, cut, range_error
from workers.gateway.core.sound_formats import MEDIA_TYPES, PCM, WAV, wav_header
from workers.gateway.http.sse import run_until_disconnect


class SoundStream(Response):
    """The sound of a request, or a part of it.

    An error before the first samples becomes a normal error response. After a later error, and when
    the gateway shuts down, the body breaks off without its end, which clients notice.
    """

    def __init__(
        self,
        context: AppContext,
        active: ActiveRequest,
        logs: Sequence[AsyncGenerator[AnyRecord, None]],
        sound_format: str,
        on_disconnect: Callable[[], None],
        part: ByteRange | None = None,
        total: int | None = None,
    ) -> None:
        """`part` is None for the whole sound. `total` is its number of bytes, None if not known."""
        self._shutting_down = context.shutting_down
        self._on_disconnect = on_disconnect
        self._part = part
        request_id = active.request_id
        headers = {
            "pagemill-request-id": request_id,
            "x-request-id": request_id,
            "x-accel-buffering": "no",
            "accept-ranges": "bytes",
            "etag": etag_of(request_id),
        }
        super().__init__(
            None,
            200 if part is None else 206,
            headers,
            MEDIA_TYPES.get(sound_format, MEDIA_TYPES[PCM]),
        )
        del self.headers["content-length"]
        num_bytes = total if part is None else part.num_bytes
        if num_bytes is not None:
            self.headers["content-length"] = str(num_bytes)
        if part is not None:
            self.headers["content-range"] = part.header
        pieces = _encoded(active, logs, sound_format)
        self._pieces = pieces if part is None else _cut(pieces, part)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._send(send)
        await run_until_disconnect(receive, work, self._on_disconnect, self._shutting_down)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            first = await anext(pieces, b"")
            start = {"type": "http.response.start", "status": self.status_code}
            await send(start | {"headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def etag_of(request_id: str) -> str:
    """Return the ETag of a request's sound, which never changes."""
    return f'"{request_id}"'


async def _encoded(
    active: ActiveRequest, logs: Sequence[AsyncGenerator[AnyRecord, None]], sound_format: str
) -> AsyncGenerator[bytes, None]:
    async with aclosing(active.sound(logs)) as chunks:
        async for chunk in chunks:
            pcm = base64.b64decode(chunk.pcm)
            is_first = sound_format == WAV and chunk.first_sample == 0
            yield wav_header(chunk.sample_rate) + pcm if is_first else pcm


async def _cut(pieces: AsyncGenerator[bytes, None], part: ByteRange) -> AsyncGenerator[bytes, None]:
    offset = 0
    async with aclosing(pieces):
        async for piece in pieces:
            sent_piece = cut(piece, offset, part)
            offset += len(piece)
            if sent_piece:
                yield sent_piece
            if offset > part.last:
                return
    if offset <= part.first:
        raise range_error(part.first, offset)
