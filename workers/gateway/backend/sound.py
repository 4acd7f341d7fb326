"""The sound of a request, as the body of a response that begins with the first samples."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared import client
from shared.bus.bus import Bus
from shared.protocol.records import AnyRecord, AudioChunk, Failure, OutputEnd
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext
from workers.gateway.backend.active_request import merge_logs
from workers.gateway.core.sound_formats import WAV, wav_header
from workers.gateway.http.errors import RequestFailed
from workers.gateway.http.sse import run_until_disconnect

MEDIA_TYPES = {WAV: "audio/wav", "pcm": "audio/pcm"}
"""The formats of sound, by their names in requests."""
# Names of fields on the bus → those of the endpoint.
_FIELDS = {"given_text": "input", "timeout_s": "timeout_s"}


class SoundStream(Response):
    """The sound of a request, which is published when the response is sent.

    An error before the first samples becomes a normal error response. After a later error, and when
    `shutting_down` is set, the body breaks off without its end, which clients notice.
    """

    def __init__(
        self, context: AppContext, request: GenerateRequest, output: str, form: str, tenant: str
    ) -> None:
        self._context = context
        self._request_id = request.request_id or client.new_request_id()
        headers = {"pagemill-request-id": self._request_id, "x-request-id": self._request_id}
        super().__init__(None, 200, headers, MEDIA_TYPES[form])
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"
        chunks = _chunks_of(context.bus, request, self._request_id, output, tenant)
        self._pieces = _encoded(chunks, form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shutting_down = self._context.shutting_down
        await run_until_disconnect(receive, self._send(send), self._on_disconnect, shutting_down)

    def _on_disconnect(self) -> None:
        self._context.background.start(client.cancel(self._context.bus, self._request_id))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            first = await anext(pieces, b"")
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _chunks_of(
    bus: Bus, request: GenerateRequest, request_id: str, output: str, tenant: str
) -> AsyncGenerator[AudioChunk, None]:
    """Publish a request, and yield the records of its sound. Raises RequestFailed."""
    logs: list[AsyncIterator[AnyRecord]] = [
        client.ask(bus, request, request_id, tenant),
        client.follow_output(bus, request_id, output, timeout_s=request.timeout_s),
    ]
    async with aclosing(merge_logs(logs)) as records:
        async for _, record in records:
            match record:
                case Failure(error=error):
                    field = _FIELDS.get(error.field or "")
                    raise RequestFailed(replace(error, field=field), "")
                case AudioChunk():
                    yield record
                case OutputEnd(cut=False):
                    return


async def _encoded(
    chunks: AsyncGenerator[AudioChunk, None], form: str
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            pcm = base64.b64decode(chunk.pcm)
            is_first = form == WAV and chunk.first_sample == 0
            yield wav_header(chunk.sample_rate) + pcm if is_first else pcm
