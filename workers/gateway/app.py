"""The application: what every route is given, who may use it, and what it answers when it fails.

A feature is a module with `routes(door) -> list[Route]`, made by `door.route`. The route is found
once, by the path alone; whether a key is needed is part of it, so there is nothing to disagree on.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from shared import client
from shared.bus.bus import Bus
from shared.config import Config
from shared.errors import PagemillError, UnknownModel
from shared.protocol.messages import RequestRecord
from shared.protocol.renderer_rpc import ErrorReply, ModelCard
from shared.telemetry.metrics import Metrics
from workers.gateway.core.assembler import Assembler, TokenBytes
from workers.gateway.core.memory_budget import AnswerBudget
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller, Keyring
from workers.gateway.http.body import BodyBudget
from workers.gateway.http.middleware import EdgeMiddleware
from workers.gateway.http.rate_limits import RateLimiter
from workers.gateway.token_bytes import TokenBytesCache

RouteHandler = Callable[[Request, Caller], Awaitable[Response]]
MakeAssembler = Callable[[str, RequestRecord, TokenBytes], Assembler]
"""Of a request's id, what is noted of it, and its model's tokens."""

# Renderers answer it from memory.
CARD_TIMEOUT_S = 5.0
# A model may be replaced by another of its name.
CARD_FRESH_S = 30.0

_log = structlog.get_logger()


class Json(Response):
    """Any msgspec type."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return errors.to_json(content)


class AppContext:
    """What all routes share."""

    def __init__(self, bus: Bus, config: Config, metrics: Metrics, worker: str) -> None:
        self.bus = bus
        self.config = config
        self.limits = config.gateway
        self.metrics = metrics
        self.worker = worker
        self.draining = False
        self.shutting_down = asyncio.Event()
        """The drain is, and nothing is waited for any more."""
        self.token_bytes = TokenBytesCache(bus)
        self.assemblers: dict[str, MakeAssembler] = {}
        """By the kind of a RequestRecord."""
        self._keyring = Keyring(config.gateway.api_keys)
        self._cards: dict[str, tuple[float, ModelCard]] = {}
        """With the loop's time at which they were told."""
        self._background: set[asyncio.Task[None]] = set()
        self.body_budget = BodyBudget(config.gateway)
        self.answer_budget = AnswerBudget(config.gateway)
        self._rate_limiter = RateLimiter(asyncio.get_running_loop().time)

    async def card(self, model: str) -> ModelCard:
        """Raises UnknownModel, or Unavailable when no renderer of it answers."""
        self.check_model(model)
        now_s = asyncio.get_running_loop().time()
        told_s, known = self._cards.get(model, (-math.inf, None))
        if known is not None and now_s - told_s < CARD_FRESH_S:
            return known
        answer = await client.model_card(self.bus, model, CARD_TIMEOUT_S)
        if isinstance(answer, ErrorReply):
            raise errors.RequestFailed(answer.error, "")
        self._cards[model] = now_s, answer
        return answer

    def check_model(self, model: str) -> None:
        """Raises UnknownModel."""
        if model not in self.config.models:
            there_is = ", ".join(sorted(self.config.models))
            raise UnknownModel(f"no model {model!r}; there is: {there_is}", field="model")

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done that no answer waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Returns when that is done, too."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def route(
        self,
        path: str,
        endpoint: RouteHandler,
        methods: Sequence[str] = ("GET",),
        *,
        public: bool = False,
        counted: bool = False,
    ) -> Route:
        """`public`: for those without a key, too. `counted`: for the limits of the key, as all is
        that makes work; what looks at it, ends it, or tells what is known anyway, is not."""

        async def guarded(request: Request) -> Response:
            request.scope["endpoint_path"] = path
            if public:
                return await endpoint(request, Caller("", ""))
            caller = self._keyring.authenticate(request.headers.getlist("authorization"))
            if counted:
                self._rate_limiter.acquire(caller)
                request.scope["release_slot"] = lambda: self._rate_limiter.release(caller)
            try:
                return await endpoint(request, caller)
            finally:
                self.body_budget.release(request)
                self.answer_budget.release(request.scope)

        return Route(path, guarded, methods=list(methods))


def application(door: AppContext, routes: Iterable[Route]) -> EdgeMiddleware:
    # A redirect would be to where the client says that we are.
    router = Router(list(routes), redirect_slashes=False)
    return EdgeMiddleware(router, door.limits, door.metrics, answer_of)


def answer_of(error: Exception) -> Response:
    """What an error is answered with; one that nobody expected goes to the log."""
    if isinstance(error, HTTPException):
        return _refused_by_router(error)
    if not isinstance(error, PagemillError):
        _log.error("not_answered", exc_info=error)
    info = errors.info_of(error)
    answer = Json(errors.body_of(info), errors.status_of(info))
    if info.retry_after_s is not None:
        answer.headers["retry-after"] = str(max(1, math.ceil(info.retry_after_s)))
    if answer.status_code == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def _refused_by_router(error: HTTPException) -> Response:
    if error.status_code != 405:
        return answer_of(errors.UnknownRoute("there is nothing at this URL"))
    answer = answer_of(errors.WrongMethod("this method is not for this URL"))
    answer.headers["allow"] = (error.headers or {}).get("Allow", "")
    return answer
