"""Liveness, readiness, version and metrics of a gateway."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import PagemillError
from shared.stage.runtime import VERSION
from shared.telemetry import prometheus
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RouteTable

ROUTES = RouteTable("Server")


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, omit_defaults=True):
    status: Literal["ok", "not ready", "draining", "no broker"]
    models: dict[str, str] = {}
    """`ok`, or the stages that no worker serves, by model."""


class Version(Struct, frozen=True):
    version: str


@ROUTES.endpoint("GET", "/health", "Whether the process lives", answer=Health, public=True)
async def health(_: AppContext, __: Request, ___: Caller) -> Response:
    return Json(Health())


@ROUTES.endpoint(
    "GET",
    "/ready",
    "Whether a request would be answered; status 503 if not",
    answer=Ready,
    statuses=(200, 503),
    public=True,
)
async def ready(context: AppContext, _: Request, __: Caller) -> Response:
    models: dict[str, str] = {}
    try:
        for model in context.config.models:
            missing = await missing_stages(context, model)
            models[model] = f"no {' and no '.join(missing)}" if missing else "ok"
    except (PagemillError, TimeoutError):
        return Json(Ready("no broker"), 503)
    is_able = "ok" in models.values() and not context.draining
    status = Ready("ok" if is_able else "draining" if context.draining else "not ready", models)
    return Json(status, 200 if is_able else 503)


@ROUTES.endpoint("GET", "/version", "The version that runs", answer=Version)
async def version(_: AppContext, __: Request, ___: Caller) -> Response:
    return Json(Version(VERSION))


@ROUTES.endpoint(
    "GET", "/metrics", "Metrics of this gateway in the format of Prometheus", answer="text/plain"
)
async def metrics(context: AppContext, _: Request, __: Caller) -> Response:
    text = prometheus.to_text(context.metrics.snapshot().series)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def missing_stages(context: AppContext, model: str) -> list[str]:
    """Return the stages that `model` needs and no worker serves.

    Raises Unavailable or TimeoutError.
    """
    beats = await context.heartbeats.read()
    serving = {beat.stage or beat.role for beat in beats if model in beat.models}
    required = ["coordinator", *context.pipelines[model].required_stages]
    return [stage for stage in required if stage not in serving]
