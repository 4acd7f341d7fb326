"""Liveness, readiness, version and metrics of a gateway."""

from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from shared.bus.store_probes import REFUSING_STREAMS
from shared.errors import PagemillError
from shared.stage.runtime import VERSION
from shared.telemetry import prometheus
from workers.gateway.app import AppContext, Json
from workers.gateway.backend.pools import read_pools
from workers.gateway.backend.responses import is_store_full
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RouteTable

ROUTES = RouteTable("Server")


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, omit_defaults=True):
    status: Literal[
        "ok", "not ready", "draining", "no broker", "broker does not store", "disk full"
    ]
    models: dict[str, str] = {}
    """`ok`, or the stages without workers, such as `no engine` or `engine is starting`, by
    model."""
    responses: Literal["ok", "store is full"] = "ok"
    """Whether further responses can be stored."""
    reason: str = ""
    """Free and required bytes of the broker's disk, if new requests are refused for them."""


class Version(Struct, frozen=True):
    version: str


@ROUTES.endpoint("GET", "/health", "Whether the process runs", answer=Health, public=True)
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
        pools = {model: await read_pools(context, model) for model in context.config.models}
        heartbeats = await context.heartbeats.read()
        is_full = await is_store_full(context)
        disk_full = await context.room.find_error()
    except (PagemillError, TimeoutError):
        return Json(Ready("no broker"), 503)
    state: Any = "ok"
    if context.draining:
        state = "draining"
    elif any(beat.load.get(REFUSING_STREAMS) for beat in heartbeats):
        state = "broker does not store"
    elif disk_full is not None:
        state = "disk full"
    elif not any(stages.accepts for stages in pools.values()):
        state = "not ready"
    models = {name: " and ".join(s.missing.values()) or "ok" for name, s in pools.items()}
    reason = "" if disk_full is None else disk_full.message
    body = Ready(state, models, "store is full" if is_full else "ok", reason)
    return Json(body, 200 if state == "ok" else 503)


@ROUTES.endpoint("GET", "/version", "The version of this gateway", answer=Version)
async def version(_: AppContext, __: Request, ___: Caller) -> Response:
    return Json(Version(VERSION))


@ROUTES.endpoint(
    "GET",
    "/metrics",
    "Metrics of this gateway in the format of Prometheus, for keys with the right `metrics`",
    answer="text/plain",
    right="metrics",
)
async def metrics(context: AppContext, _: Request, __: Caller) -> Response:
    text = prometheus.to_text(context.metrics.snapshot().series)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
