"""The HTTP application: the context that all routes share, API keys and limits, error responses.

A request is routed once, by its path alone. The route declares whether it needs a key, so the
router and the check of keys cannot disagree.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Scope

from shared import client
from shared.bus.bus import Bus
from shared.bus.store_room import StoreRoom
from shared.config.schema import Config, Right
from shared.errors import PagemillError, UnknownModel
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.records import ErrorInfo
from shared.protocol.renderer_rpc import ModelCard
from shared.stage.pipelines import pipelines_of
from shared.telemetry.metrics import Metrics
from shared.tenants.storage_quotas import MediaQuotas, StorageQuotas
from workers.gateway.anthropic import errors as message_errors
from workers.gateway.caches import ReportsCache, SizeCache, StoreUseCache, TokenBytesCache
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.memory_budget import AnswerBudget
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller, Keyring, RateLimiter
from workers.gateway.http.body import BodyReader
from workers.gateway.http.connection import claim_place
from workers.gateway.http.middleware import ANTHROPIC_VERSION, EdgeMiddleware
from workers.gateway.http.origins import OriginPolicy
from workers.gateway.http.sse import ErrorResponder

RouteHandler = Callable[[Request, Caller], Awaitable[Response]]

# Renderers have the cards in memory.
CARD_TIMEOUT_S = 5.0
# A model may be replaced by another model of the same name.
CARD_FRESH_S = 30.0

_log = structlog.get_logger()


class Json(Response):
    """JSON response. Its content may have any type that msgspec encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class AppContext:
    """State that all routes of a gateway share."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        metrics: Metrics,
        worker: str,
        kinds: Iterable[AnswerKind[Any]] = (),
    ) -> None:
        """`kinds` are the kinds of answers of all routes."""
        self.bus = bus
        self.config = config
        self.limits = config.gateway
        self.pipelines = pipelines_of(config)
        self.metrics = metrics
        self.worker = worker
        self.started_s = self.now_s
        self.draining = False
        self.shutting_down = asyncio.Event()
        """Set when the time for the drain is over. Responses that are still open then break off."""
        self.lane: Literal["batch"] | None = None
        """Lane of all requests, in a batcher; None if each request names its lane."""
        self.token_bytes = TokenBytesCache(bus)
        self.room = StoreRoom(bus)
        self.quotas = StorageQuotas(bus)
        self.media_quotas = MediaQuotas(bus, config.delivery.tenant_weights)
        self.store_size = SizeCache(bus, subjects.STEPS_STREAM)
        self.store_use = StoreUseCache(bus)
        self.heartbeats = ReportsCache(bus.heartbeats.read)
        self.start_reports = ReportsCache(bus.heartbeats.read_starts)
        self.refusals = ReportsCache(bus.heartbeats.read_refusals)
        self.kinds = {kind.name: kind for kind in kinds}
        self.bodies = BodyReader(config.gateway)
        self.answer_budget = AnswerBudget(config.gateway)
        self._keyring = Keyring(config.gateway.api_keys, config.gateway.tenant)
        self.origins = OriginPolicy(config.gateway)
        self._rate_limiter = RateLimiter(asyncio.get_running_loop().time)
        self._cards: dict[str, tuple[float, ModelCard]] = {}
        """Model cards by model, each with the loop time at which it was received."""
        self.background = TaskSet()
        """Work that no response waits for."""

    @property
    def now_s(self) -> int:
        """Unix seconds of the broker's clock."""
        return int(self.bus.now_ms() / 1000)

    async def model_card(self, model: str) -> ModelCard:
        """Return the card of a model, from the cache or from a renderer.

        Raises UnknownModel, or Unavailable when no renderer of the model answers.
        """
        self.check_model(model)
        now_s = asyncio.get_running_loop().time()
        received_s, cached = self._cards.get(model, (-math.inf, None))
        if cached is not None and now_s - received_s < CARD_FRESH_S:
            return cached
        card = await client.model_card(self.bus, model, CARD_TIMEOUT_S)
        self._cards[model] = now_s, card
        return card

    async def pin_media(self, data: bytes, tenant: str) -> str:
        """Store a media file, and return its URL.

        Raises DiskFull, QuotaExceeded or Unavailable.
        """
        await self.room.check()
        await self.media_quotas.check(tenant, len(data))
        return await client.pin_media(self.bus, data, tenant)

    def check_model(self, model: str) -> None:
        """Raises UnknownModel."""
        if model not in self.config.models:
            models = ", ".join(sorted(self.config.models))
            raise UnknownModel(f"no model {model!r}; there is: {models}", field="model")

    def authenticate(self, request: Request) -> Caller:
        """Return the sender of a request. Raises InvalidKey."""
        headers = request.headers
        authorization = headers.getlist("authorization")
        keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        return self._keyring.authenticate(authorization or keys)

    def reload(self, config: Config) -> None:
        """Take over the API keys of a changed configuration."""
        self._keyring = Keyring(config.gateway.api_keys, config.gateway.tenant)
        self.bodies.set_keys(config.gateway.api_keys)
        self.origins.set_keys(config.gateway.api_keys)

    async def close(self) -> None:
        """Wait for the background work."""
        await asyncio.gather(*self.background, return_exceptions=True)

    def route(
        self,
        path: str,
        endpoint: RouteHandler,
        methods: Sequence[str] = ("GET",),
        *,
        public: bool = False,
        counted: bool = False,
        right: Right = "requests",
        refuse: ErrorResponder | None = None,
    ) -> Route:
        """Return a route that checks the API key and releases the request's memory at its end.

        A `public` route needs no key. Any other route needs a key with `right`. Requests to a
        `counted` route count for the limits of the key. Every route that starts work is counted. A
        route that shows or ends work, or returns data from the gateway's memory, is not. `refuse`
        makes the responses for errors, by default `responder_of`.
        """

        async def guarded(request: Request) -> Response:
            request.scope["endpoint_path"] = path
            try:
                return await answer(request)
            except PagemillError as error:
                if refuse is None:
                    raise
                return refuse(error)

        async def answer(request: Request) -> Response:
            if public:
                return await endpoint(request, Caller("", ""))
            caller = self.authenticate(request)
            claim_place(request.scope, caller.tenant)
            caller.check_right(right)
            request.scope["tenant"] = caller.tenant
            if counted:
                self._rate_limiter.acquire(caller)
                request.scope["release_slot"] = lambda: self._rate_limiter.release(caller)
            try:
                return await endpoint(request, caller)
            finally:
                self.bodies.release(request)
                self.answer_budget.release(request.scope)

        # The name of a model may have slashes, which clients send as they are or encoded.
        pattern = path.replace("{model}", "{model:path}")
        return Route(pattern, guarded, methods=list(methods))


def build_application(context: AppContext, routes: Iterable[Route]) -> EdgeMiddleware:
    # A redirect would lead to the host in the client's own Host header.
    router = Router(list(routes), redirect_slashes=False)
    return EdgeMiddleware(router, context.limits, context.metrics, responder_of, context.origins)


def error_response(
    error: Exception,
    body_of: Callable[[ErrorInfo], Any] = errors.body_of,
    status_of: Callable[[ErrorInfo], int] = errors.status_of,
) -> Response:
    """Return the response for an error. Errors other than PagemillError are logged as well."""
    router_error = error if isinstance(error, HTTPException) else None
    if router_error is not None:
        error = _without_route(router_error)
    if not isinstance(error, PagemillError):
        _log.error("unexpected_error", exc_info=error)
    info = errors.info_of(error)
    answer = Json(body_of(info), status_of(info))
    if info.retry_after_s is not None:
        answer.headers["retry-after"] = str(max(1, math.ceil(info.retry_after_s)))
    if isinstance(error, errors.RangeNotSatisfiable):
        answer.headers["content-range"] = f"bytes */{error.total}"
    if answer.status_code == 401:
        answer.headers["www-authenticate"] = "Bearer"
    if router_error is not None:
        answer.headers.update(router_error.headers or {})
    return answer


message_error_response = partial(
    error_response, body_of=message_errors.body_of, status_of=message_errors.status_of
)
"""Returns the response for an error in the form of Anthropic's API."""


def responder_of(scope: Scope) -> ErrorResponder:
    """Return the function for errors of a request that no endpoint answers in another form."""
    is_anthropic = any(name == ANTHROPIC_VERSION for name, _ in scope["headers"])
    return message_error_response if is_anthropic else error_response


def _without_route(error: HTTPException) -> PagemillError:
    if error.status_code == 405:
        return errors.WrongMethod("this method is not for this URL")
    return errors.UnknownRoute("there is nothing at this URL")
