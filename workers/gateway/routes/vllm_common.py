"""What the endpoints of the token protocol share: how they read, ask renderers, and refuse."""

import functools
from collections.abc import Collection
from typing import Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared import client
from shared.errors import PagemillError, UnknownModel
from shared.protocol.messages import GenerateRequest
from shared.protocol.renderer_rpc import (
    DetokenizeRequest,
    ErrorReply,
    FeaturesRequest,
    RenderedFeatures,
)
from workers.gateway.app import AppContext, Json, RouteHandler, error_response
from workers.gateway.backend.uploads import store_large_images
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.http import body, errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import RequestFailed, WrongContentType
from workers.gateway.vllm.errors import body_of, is_their_fault, status_of

BuildAnswer = TypeVar("BuildAnswer")
Payload = Literal["tensors", "none"]


class VllmRoutes:
    def __init__(self, context: AppContext) -> None:
        self.context = context

    def post(self, path: str, endpoint: RouteHandler, *, counted: bool = False) -> Route:
        """A route that refuses in the words of the protocol."""

        @functools.wraps(endpoint)
        async def spoken(request: Request, caller: Caller) -> Response:
            try:
                return await endpoint(request, caller)
            except PagemillError as error:
                return refusal(error)

        return self.context.route(path, spoken, ("POST",), counted=counted)

    async def read(self, request: Request) -> bytes:
        """The body of a request that says it is JSON. Raises a RequestError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise WrongContentType("Unsupported Media Type: Only 'application/json' is allowed")
        return await body.read(request, self.context.limits, self.context.body_budget)

    def model(self, name: str | None) -> str:
        """The model of this name; without one the only one. Raises UnknownModel."""
        models = self.context.config.models
        if name is None and len(models) == 1:
            return next(iter(models))
        if name is None or name not in models:
            raise UnknownModel(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(sorted(models))}.",
                field="model",
            )
        return name

    async def features_of(
        self, request: GenerateRequest, payload: Payload, caller: Caller
    ) -> RenderedFeatures:
        small = await store_large_images(self.context, request, caller.tenant)
        question = FeaturesRequest(small, payload)
        told = await client.render_features(self.context.bus, question, tenant=caller.tenant)
        return answered(told)

    async def text_of(
        self, model: str, token_ids: list[int], skip_special_tokens: bool, tenant: str
    ) -> str:
        if not token_ids:
            return ""
        question = DetokenizeRequest(token_ids, skip_special_tokens=skip_special_tokens)
        told = await client.detokenize(self.context.bus, model, question, tenant=tenant)
        return answered(told).prompt

    async def spelling_of(self, model: str, token_ids: Collection[int], tenant: str) -> TokenBytes:
        """Of these tokens at least."""
        await self.context.token_bytes.load(model, token_ids, tenant)
        return self.context.token_bytes.of(model)


def refusal(error: Exception) -> Response:
    """Of what is the client's fault; anything else is answered as everywhere."""
    info = errors.info_of(error)
    if not is_their_fault(info):
        return error_response(error)
    return Json(body_of(info), status_of(info))


def answered(answer: BuildAnswer | ErrorReply) -> BuildAnswer:
    """What a worker has answered. Raises Failed for a Refusal."""
    if isinstance(answer, ErrorReply):
        raise RequestFailed(answer.error, "")
    return answer
