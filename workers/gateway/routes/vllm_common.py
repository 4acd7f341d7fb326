"""Functions of all endpoints of vLLM's token protocol: bodies, requests to renderers, refusals."""

from functools import partial
from typing import Any, Literal

from shared import client
from shared.errors import UnknownModel
from shared.protocol.renderer_rpc import FeaturesRequest, RenderedFeatures
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext, error_response
from workers.gateway.backend.uploads import store_large_images
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RouteTable
from workers.gateway.vllm.errors import body_of, status_of

Payload = Literal["tensors", "none"]


def vllm_route_table(tag: str, **details: Any) -> RouteTable:
    refuse = partial(error_response, body_of=body_of, status_of=status_of)
    return RouteTable(tag, refuse=refuse, status_of=status_of, **details)


def resolve_model(context: AppContext, name: str | None) -> str:
    """Return the model of this name. Without a name, return the only model. Raises UnknownModel."""
    models = context.config.models
    if name is None and len(models) == 1:
        return next(iter(models))
    if name is None or name not in models:
        raise UnknownModel(
            f"The model `{name}` does not exist. Valid aliases: {', '.join(sorted(models))}.",
            field="model",
        )
    return name


async def render_features(
    context: AppContext, request: GenerateRequest, payload: Payload, caller: Caller
) -> RenderedFeatures:
    small = await store_large_images(context, request, caller.tenant)
    question = FeaturesRequest(small, payload)
    return await client.render_features(context.bus, question, tenant=caller.tenant)
