"""`/v1/models`: the configured models, in OpenAI's form, or in Anthropic's for its clients."""

import asyncio
import contextlib
from datetime import UTC, datetime

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import Unavailable, UnknownModel
from shared.protocol.multimodal import Modality
from shared.protocol.pipeline import has_embeddings
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.http.middleware import ANTHROPIC_VERSION
from workers.gateway.route_table import Parameter, RouteTable
from workers.gateway.schemas.messages import ModelInfo, ModelInfoList

ROUTES = RouteTable("Models")


class ModelEntry(Struct, frozen=True):
    id: str
    created: int
    adapters: list[str]
    object: str = "model"
    owned_by: str = "pagemill"
    max_model_len: int | UnsetType = UNSET
    """The configured limit. The model's own limit is not known here."""
    embeddings: bool = True
    """Whether `/v1/embeddings` takes the model."""
    scores: bool = True
    """Whether `/v1/score` and `/v1/rerank` take the model."""
    media: list[Modality] | UnsetType = UNSET
    """Kinds of media that prompts may have; absent while no renderer of the model runs."""
    description: str | UnsetType = UNSET
    """The model's `description` in the configuration."""


class ModelList(Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


FORM = Parameter(
    ANTHROPIC_VERSION.decode(),
    "header",
    "Any value: answer as Anthropic's API does, with a `ModelInfo` for each model",
)


@ROUTES.endpoint(
    "GET",
    "/v1/models",
    "The models that are served here",
    answer=ModelList,
    parameters=(FORM,),
)
async def list_models(context: AppContext, request: Request, _: Caller) -> Response:
    names = list(context.config.models)
    if FORM.name in request.headers:
        infos = [_info(context, name) for name in names]
        return Json(ModelInfoList(infos, first_id=names[0], last_id=names[-1]))
    return Json(ModelList(await asyncio.gather(*(_entry(context, name) for name in names))))


@ROUTES.endpoint(
    "GET",
    "/v1/models/{model}",
    "One of the models",
    answer=ModelEntry,
    refuses=(UnknownModel,),
    parameters=(FORM,),
)
async def show_model(context: AppContext, request: Request, _: Caller) -> Response:
    name = request.path_params["model"]
    if name not in context.config.models:
        raise UnknownModel(f"there is no model {name!r} here", field="model")
    if FORM.name in request.headers:
        return Json(_info(context, name))
    return Json(await _entry(context, name))


def _info(context: AppContext, name: str) -> ModelInfo:
    created_at = datetime.fromtimestamp(context.started_s, UTC)
    max_len = context.config.models[name].max_model_len or UNSET
    return ModelInfo(name, name, created_at.strftime("%Y-%m-%dT%H:%M:%SZ"), max_len)


async def _entry(context: AppContext, name: str) -> ModelEntry:
    model = context.config.models[name]
    media = None
    if context.bus.is_connected:
        with contextlib.suppress(Unavailable):
            media = (await context.model_card(name)).media
    max_len = model.max_model_len or UNSET
    embeds = has_embeddings(context.pipelines[name])
    return ModelEntry(
        name,
        context.started_s,
        sorted(model.adapters),
        max_model_len=max_len,
        embeddings=embeds,
        scores=embeds,
        media=UNSET if media is None else media,
        description=model.description or UNSET,
    )
