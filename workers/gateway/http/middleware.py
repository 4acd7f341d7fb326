"""ASGI middleware: header limits and checks, security headers, CORS, metrics, access log, errors.

Each response to a request for an answer, and each error, has a header with a request id.

It is written against ASGI itself, because every chunk of a streamed response passes through it.
CORS is part of it rather than a separate middleware, so that error responses carry the CORS headers
too, and preflight requests are subject to the same limits and metrics as all others.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.config.schema import GatewayConfig
from shared.errors import InvalidRequest, RequestError
from shared.protocol.records import Usage
from shared.telemetry.metrics import Metrics
from workers.gateway.http.errors import HeadersTooLarge
from workers.gateway.http.origins import OriginPolicy
from workers.gateway.http.sse import ErrorResponder

MAX_HEADERS = 128
CLIENT_LEFT = 499
"""Status in the access log for a client that left before the response began, as in nginx."""

_log = structlog.get_logger()

Headers = list[tuple[bytes, bytes]]

SECURITY: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
# A route may set its own values. A response is by default private to its client, and no document.
DEFAULTS: Headers = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
REQUEST_ID = b"x-request-id"
ANTHROPIC_VERSION = b"anthropic-version"
"""Header of clients of Anthropic's API. They read the id of a request from `request-id`."""
_VARY = (b"vary", b"origin")
_CORS: Headers = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    # Clients in browsers send additional headers, such as OpenAI's `x-stainless-…`. The star stands
    # for all headers but Authorization.
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
    (b"access-control-max-age", b"600"),
]


class EdgeMiddleware:
    """The outermost ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        limits: GatewayConfig,
        metrics: Metrics,
        responder_of: Callable[[Scope], ErrorResponder],
        origins: OriginPolicy,
    ) -> None:
        """`responder_of` returns the function that makes the response for an exception of `app`."""
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._responder_of = responder_of
        self._origins = origins
        self._in_flight = 0
        self._cors: dict[bytes | None, Headers] = {
            origin.encode(): [_VARY, (b"access-control-allow-origin", origin.encode()), *_CORS]
            for origin in limits.cors_origins
        }
        self._no_cors: Headers = [_VARY] if self._cors else []
        metrics.set_function("http_requests_in_flight", lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # With this entry Starlette's router raises 404 and 405 instead of sending them itself.
        scope["app"] = self
        cors = self._cors.get(_header(scope["headers"], b"origin"), self._no_cors)
        response = _ResponseSender(scope, send, cors)
        self._in_flight += 1
        try:
            answer = self._early_response(scope)
            if answer is not None:
                await answer(scope, receive, response.send)
            else:
                await self._app(scope, receive, response.send)
        except ClientDisconnect:
            pass  # There is no client to answer.
        except Exception as error:
            if response.status is not None:
                raise  # The connection breaks in the middle of the response, which clients notice.
            await self._responder_of(scope)(error)(scope, receive, response.send)
        finally:
            self._in_flight -= 1
            response.release_slot()
            self._count(scope, response)

    def _early_response(self, scope: Scope) -> Response | None:
        """Return the response to a request that is not routed: a refusal, or a CORS preflight."""
        headers: Headers = scope["headers"]
        try:
            self._check_headers(scope, headers)
        except RequestError as error:
            return self._responder_of(scope)(error)
        is_allowed = _header(headers, b"origin") in self._cors
        method = _header(headers, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and is_allowed and method is not None:
            return Response(status_code=204)
        return None

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope["raw_path"]) + len(scope["query_string"])
        max_kib = self._limits.max_header_kib
        if size > max_kib * 2**10 or len(headers) > MAX_HEADERS:
            message = f"a request may have at most {MAX_HEADERS} headers of {max_kib} KiB together"
            raise HeadersTooLarge(message)
        num_hosts = sum(name == b"host" for name, _ in headers)
        if num_hosts > 1 or (not num_hosts and scope["http_version"] == "1.1"):
            complaint = "given twice" if num_hosts else "missing"
            raise InvalidRequest(f"the header Host is {complaint}", field="Host")
        host, origin = (
            None if value is None else value.decode("latin-1")
            for value in (_header(headers, b"host"), _header(headers, b"origin"))
        )
        self._origins.check(scope["method"], host, origin)

    def _count(self, scope: Scope, response: "_ResponseSender") -> None:
        endpoint = scope.get("endpoint_path", "none")
        status = "none" if response.status is None else str(response.status)
        metrics = self._metrics
        metrics.counter("http_requests_total", endpoint=endpoint, status=status).add()
        metrics.counter("http_answer_bytes_total", endpoint=endpoint).add(response.num_bytes)
        seconds = time.monotonic() - response.began_s
        metrics.histogram("http_request_seconds", endpoint=endpoint).observe(seconds)
        if self._limits.access_log:
            _write_access(scope, response, seconds)


def _write_access(scope: Scope, response: "_ResponseSender", seconds: float) -> None:
    """Log a request that has ended. Its query and its headers may have secrets."""
    usages: list[Usage] = scope.get("usages", [])
    # A client that leaves before the response begins may have a request that continues.
    request_id = response.request_id or response.find_id()
    _log.info(
        "http_request",
        client=None if scope.get("client") is None else scope["client"][0],
        tenant=scope.get("tenant"),
        method=scope["method"],
        path=scope["path"],
        status=CLIENT_LEFT if response.status is None else response.status,
        seconds=round(seconds, 3),
        num_bytes=response.num_bytes,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages) if usages else None,
        completion_tokens=sum(usage.completion_tokens for usage in usages) if usages else None,
        request_id=None if request_id is None else request_id.decode(),
    )


@dataclass(slots=True)
class _ResponseSender:
    """Sends one response: adds headers, counts bytes, releases the key's rate-limit slot."""

    scope: Scope
    forward: Send
    cors: Headers
    began_s: float = field(default_factory=time.monotonic)
    status: int | None = None
    num_bytes: int = 0
    request_id: bytes | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message["headers"])
            names = {name for name, _ in headers}
            added = [header for header in DEFAULTS if header[0] not in names]
            self.request_id = _header(headers, REQUEST_ID) or self.find_id()
            if REQUEST_ID not in names and self.request_id is not None:
                added.append((REQUEST_ID, self.request_id))
            if self.request_id is not None and _header(self.scope["headers"], ANTHROPIC_VERSION):
                added.append((b"request-id", self.request_id))
            message = {**message, "headers": [*headers, *added, *SECURITY, *self.cors]}
        else:
            self.num_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                # A client may send its next request before this coroutine runs again.
                self.release_slot()
        await self.forward(message)

    def find_id(self) -> bytes | None:
        """Return the id of the request. An error without a request has one, too."""
        identity: tuple[str, bool] | None = self.scope.get("request_id")
        if identity is not None:
            return identity[0].encode()
        is_error = self.status is not None and self.status >= 400
        return f"none-{secrets.token_hex(8)}".encode() if is_error else None

    def release_slot(self) -> None:
        """Stop counting the request for its key's limits. A second call has no effect."""
        release = self.scope.pop("release_slot", None)
        if release is not None:
            release()


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
