"""Calls of the gateway's endpoints inside the process, each for the tenant of its batch.

So a line has every limit, error and answer that the same request has over HTTP.
"""

import asyncio
from dataclasses import dataclass
from functools import cached_property

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from shared.protocol.encoding import to_json
from shared.state.batch_files import MediaLender
from shared.state.media_store import MediaUpload
from workers.gateway.app import AppContext
from workers.gateway.batches.results import Answer, AnswerFile
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller

CALLER = "pagemill.caller"
"""Key of the ASGI scope. A server never sets it, so no client can."""


class BatchApp(AppContext):
    """State of the routes in a batcher, which has no listener and names the caller itself."""

    @cached_property
    def lender(self) -> MediaLender:
        return MediaLender(self.bus, max(self.config.renderer.max_bytes.values()))

    def authenticate(self, request: Request) -> Caller:
        caller: Caller = request.scope[CALLER]
        return caller


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an endpoint with a JSON body."""

    path: str
    body: bytes
    tenant: str
    request_id: str
    """The same id from the same tenant means the same request, also in another process."""


class _Receiver:
    """Receives a response: JSON and text in memory, any other content in `upload`."""

    def __init__(self, upload: MediaUpload) -> None:
        self._status = 0
        self.is_whole = False
        self._upload = upload
        self._media_type = ""
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Receive a part of the response. Raises Unavailable."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = Headers(raw=message["headers"])
            self._media_type = headers.get("content-type", "").partition(";")[0]
            return
        data = message.get("body", b"")
        if self._is_file:
            await self._upload.write(data)
        else:
            self._body.extend(data)
        self.is_whole = not message.get("more_body", False)

    async def answer(self, request_id: str) -> Answer:
        """Return the response, which must be whole. Raises Unavailable."""
        if self._is_file:
            name, head = await self._upload.seal()
            file = AnswerFile(self._media_type, name, head)
            return Answer(self._status, b"", request_id, file)
        body = bytes(self._body)
        is_json = self._media_type == "application/json"
        return Answer(self._status, body if is_json else to_json(body.decode()), request_id)

    @property
    def _is_file(self) -> bool:
        return not self._media_type.startswith(("application/json", "text/"))


async def call(
    app: ASGIApp, call: Call, withdrawn: asyncio.Event, upload: MediaUpload
) -> Answer | None:
    """Return the answer of an endpoint; None if the call is withdrawn before.

    When `withdrawn` is set, the request is cancelled, as after a disconnect of an HTTP client. A
    cancellation of this coroutine leaves the request in flight, for another call with its id.
    Content that is neither JSON nor text is stored by `upload`, which has no name yet.
    """
    receiver, has_body = _Receiver(upload), False

    async def receive() -> Message:
        nonlocal has_body
        if not has_body:
            has_body = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await withdrawn.wait()
        return {"type": "http.disconnect"}

    try:
        await app(_scope(call), receive, receiver.send)
        return await receiver.answer(call.request_id) if receiver.is_whole else None
    except Exception as error:
        # The response has begun, so the application cannot send the error. A listener would break
        # off the connection.
        return refusal(error, call.request_id)


def refusal(error: Exception, request_id: str) -> Answer:
    """Return the answer that an endpoint would send for an error."""
    info = errors.info_of(error)
    return Answer(errors.status_of(info), to_json(errors.body_of(info)), request_id)


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.0",  # HTTP/1.0 needs no header Host.
        "method": "POST",
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(call.body)).encode()),
            (b"x-request-id", call.request_id.encode()),
        ],
        "client": None,
        "server": None,
        CALLER: Caller("batch", call.tenant),
        # A client's header with the same content is the name of another request.
        "request_id": (call.request_id, True),
    }
