"""Calls of the gateway's endpoints inside the process, each for the tenant of its batch.

So a line has every limit, error and answer that the same request has over HTTP.
"""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from workers.gateway.app import AppContext
from workers.gateway.batches.results import Answer
from workers.gateway.http.auth import Caller

CALLER = "pagemill.caller"
"""Key of the ASGI scope. A server never sets it, so no client can."""


class BatchApp(AppContext):
    """State of the routes in a batcher, which has no listener and names the caller itself."""

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


async def call(app: ASGIApp, call: Call, withdrawn: asyncio.Event) -> Answer | None:
    """Return the answer of an endpoint; None if the call is withdrawn before.

    When `withdrawn` is set, the request is cancelled, as after a disconnect of an HTTP client. A
    cancellation of this coroutine leaves the request in flight, for another call with its id.
    """
    has_body = False
    status, body = 0, bytearray()

    async def receive() -> Message:
        nonlocal has_body
        if not has_body:
            has_body = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await withdrawn.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body.extend(message.get("body", b""))

    await app(_scope(call), receive, send)
    return Answer(status, bytes(body), call.request_id) if status else None


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
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
    }
