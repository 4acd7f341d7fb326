"""`/v1/models`: what is configured here."""

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.errors import UnknownModel
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller


class ModelEntry(Struct, frozen=True):
    id: str
    created: int
    adapters: list[str]
    object: str = "model"
    owned_by: str = "pagemill"
    max_model_len: int | UnsetType = UNSET
    """Where it is configured; else the model's own is not known here."""


class ModelList(Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


def routes(context: AppContext) -> list[Route]:
    created = int(context.bus.now_ms() / 1000)
    entries = {
        name: ModelEntry(
            name, created, sorted(model.adapters), max_model_len=model.max_model_len or UNSET
        )
        for name, model in context.config.models.items()
    }

    async def every(_: Request, __: Caller) -> Response:
        return Json(ModelList(list(entries.values())))

    async def one(request: Request, _: Caller) -> Response:
        name = request.path_params["model"]
        if name not in entries:
            raise UnknownModel(f"there is no model {name!r} here", field="model")
        return Json(entries[name])

    return [context.route("/v1/models", every), context.route("/v1/models/{model}", one)]
