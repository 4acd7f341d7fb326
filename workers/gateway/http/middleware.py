"""What surrounds every route: limits on headers, security headers, CORS, numbers, the last catch.

Written against ASGI itself, for a streamed answer passes it with every chunk.
"""

import time
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.config import GatewayConfig
from shared.errors import InvalidRequest
from shared.telemetry.metrics import Metrics
from workers.gateway.http.errors import HeadersTooLarge

MAX_HEADERS = 128

Headers = list[tuple[bytes, bytes]]

SECURITY: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
# Unless a route says otherwise: an answer is its client's alone, and no document.
DEFAULTS: Headers = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
_METHODS = b"GET, POST, DELETE"
# Clients in browsers send headers of their own, such as OpenAI's; the star stands for all but one.
_ALLOWED = b"authorization, *"
_EXPOSED = b"x-request-id, retry-after"


class EdgeMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        limits: GatewayConfig,
        metrics: Metrics,
        answer_of: Callable[[Exception], Response],
    ) -> None:
        self._app = app
        self._max_header_bytes = limits.max_header_kib * 2**10
        self._origins = frozenset(origin.encode() for origin in limits.cors_origins)
        self._metrics = metrics
        self._answer_of = answer_of
        self._in_flight = 0
        metrics.set_function("http_requests_in_flight", lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # With it the router raises what it refuses, and we answer.
        scope["app"] = self
        passing = _Passing(scope, send, self._cors(scope["headers"]))
        self._in_flight += 1
        try:
            answer = self._refusal(scope)
            if answer is not None:
                await answer(scope, receive, passing.send)
            else:
                await self._app(scope, receive, passing.send)
        except ClientDisconnect:
            pass  # There is nobody to be told anything.
        except Exception as error:
            if passing.status is not None:
                raise  # The connection is closed in the middle of the answer, for all to see.
            await self._answer_of(error)(scope, receive, passing.send)
        finally:
            self._in_flight -= 1
            passing.leave()
            self._count(scope, passing)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: Headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if size > self._max_header_bytes or len(headers) > MAX_HEADERS:
            return self._answer_of(HeadersTooLarge("the request's headers are too large"))
        if sum(name == b"host" for name, _ in headers) > 1:
            return self._answer_of(InvalidRequest("the header Host is there twice", field="Host"))
        origin = _header(headers, b"origin")
        asked = _header(headers, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and origin in self._origins and asked is not None:
            return Response(status_code=204)
        return None

    def _cors(self, headers: Headers) -> Headers:
        if not self._origins:
            return []
        origin = _header(headers, b"origin")
        if origin not in self._origins or origin is None:
            return [(b"vary", b"origin")]
        return [
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", _ALLOWED),
            (b"access-control-expose-headers", _EXPOSED),
            (b"access-control-max-age", b"600"),
        ]

    def _count(self, scope: Scope, passing: "_Passing") -> None:
        endpoint = scope.get("endpoint_path", "none")
        status = "none" if passing.status is None else str(passing.status)
        metrics = self._metrics
        metrics.counter("http_requests_total", endpoint=endpoint, status=status).add()
        metrics.counter("http_answer_bytes_total", endpoint=endpoint).add(passing.num_bytes)
        seconds = metrics.histogram("http_request_seconds", endpoint=endpoint)
        seconds.observe(time.monotonic() - passing.began_s)


class _Passing:
    """An answer on its way out."""

    __slots__ = ("_cors", "_scope", "_send", "began_s", "num_bytes", "status")

    def __init__(self, scope: Scope, send: Send, cors: Headers) -> None:
        self._scope = scope
        self._send = send
        self._cors = cors
        self.began_s = time.monotonic()
        self.status: int | None = None
        self.num_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = list(message["headers"])
            names = {name for name, _ in own}
            added = [header for header in DEFAULTS if header[0] not in names]
            message = {**message, "headers": [*own, *added, *SECURITY, *self._cors]}
        else:
            self.num_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                # Who has all of an answer may ask the next question before we are back here.
                self.leave()
        await self._send(message)

    def leave(self) -> None:
        """The request does not count for its key's limits any more."""
        leave = self._scope.pop("release_slot", None)
        if leave is not None:
            leave()


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for known, value in headers if known == name), None)
