"""Liveness, readiness, version and metrics of a gateway."""

from typing import Literal, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import PagemillError
from shared.stage.runtime import VERSION
from shared.telemetry import prometheus
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RouteTable
from workers.roles import role_of

ROUTES = RouteTable("Server")


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, omit_defaults=True):
    status: Literal["ok", "not ready", "draining", "no broker"]
    models: dict[str, str] = {}
    """`ok`, or the stages that no worker serves, such as `no engine` or `engine is starting`, by
    model."""


class ModelState(NamedTuple):
    """What `/ready` knows of one model."""

    accepts: bool
    """Whether requests are accepted; they may have to wait for a stage without workers."""
    told: str


class Version(Struct, frozen=True):
    version: str


@ROUTES.endpoint("GET", "/health", "Whether the process lives", answer=Health, public=True)
async def health(_: AppContext, __: Request, ___: Caller) -> Response:
    return Json(Health())


@ROUTES.endpoint(
    "GET",
    "/ready",
    "Whether requests are accepted; status 503 if not",
    answer=Ready,
    statuses=(200, 503),
    public=True,
)
async def ready(context: AppContext, _: Request, __: Caller) -> Response:
    try:
        states = {model: await _read_state(context, model) for model in context.config.models}
    except (PagemillError, TimeoutError):
        return Json(Ready("no broker"), 503)
    accepts = any(state.accepts for state in states.values()) and not context.draining
    told = {model: state.told for model, state in states.items()}
    status = Ready("ok" if accepts else "draining" if context.draining else "not ready", told)
    return Json(status, 200 if accepts else 503)


@ROUTES.endpoint("GET", "/version", "The version that runs", answer=Version)
async def version(_: AppContext, __: Request, ___: Caller) -> Response:
    return Json(Version(VERSION))


@ROUTES.endpoint(
    "GET", "/metrics", "Metrics of this gateway in the format of Prometheus", answer="text/plain"
)
async def metrics(context: AppContext, _: Request, __: Caller) -> Response:
    text = prometheus.to_text(context.metrics.snapshot().series)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _read_state(context: AppContext, model: str) -> ModelState:
    """Return whether requests for `model` are accepted, and the stages that no worker serves.

    Raises Unavailable or TimeoutError.
    """
    beats = await context.heartbeats.read()
    serving = {beat.stage or beat.role for beat in beats if model in beat.models}
    roles = {stage.name: stage.role for stage in context.pipelines[model].stages}
    required = {"coordinator": "coordinator"} | {
        stage: roles[stage] for stage in context.pipelines[model].required_stages
    }
    missing = [stage for stage in required if stage not in serving]
    if not missing:
        return ModelState(True, "ok")
    reports = await context.start_reports.read()
    starting = {report.stage or report.role for report in reports if report.model in ("", model)}
    told = (f"{stage} is starting" if stage in starting else f"no {stage}" for stage in missing)
    accepts = all(_may_be_empty(required[stage]) for stage in missing)
    return ModelState(accepts, " and ".join(told))


def _may_be_empty(role: str) -> bool:
    """Return whether requests are accepted while no worker of this role runs.

    They wait in its queue, by which its pool may grow again. Coordinators and renderers also
    answer questions of gateways.
    """
    return role_of(role).one_model
