"""Does the process live; can it serve; what is it; how does it do."""

import asyncio
import time
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.errors import PagemillError
from shared.protocol.messages import Heartbeat
from shared.stage.runtime import VERSION
from shared.telemetry import prometheus
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller

ASK_S = 2.0
# Whoever asks for this often does not ask the broker each time.
FRESH_S = 0.5

_heartbeat = msgspec.json.Decoder(Heartbeat)


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, omit_defaults=True):
    status: Literal["ok", "not ready", "draining", "no broker"]
    models: dict[str, str] = {}
    """By model: `ok`, or which roles nobody has taken."""


class Version(Struct, frozen=True):
    version: str


class Living:
    """The workers that there are, by their heartbeats."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._beats: list[Heartbeat] = []
        self._read_s = float("-inf")

    async def missing(self, model: str) -> list[str]:
        """Roles without which nobody can be answered by `model`. Raises Unavailable, or
        TimeoutError."""
        beats = await self._all()
        roles = ("coordinator", "renderer", "engine")
        return [r for r in roles if not any(b.role == r and model in b.models for b in beats)]

    async def _all(self) -> list[Heartbeat]:
        if time.monotonic() - self._read_s > FRESH_S:
            async with asyncio.timeout(ASK_S):
                found = await self._context.bus.read_heartbeats()
            self._beats = [_heartbeat.decode(data) for data in found]
            self._read_s = time.monotonic()
        return self._beats


def routes(context: AppContext) -> list[Route]:
    living = Living(context)

    async def health(_: Request, __: Caller) -> Response:
        return Json(Health())

    async def ready(_: Request, __: Caller) -> Response:
        models: dict[str, str] = {}
        try:
            for model in context.config.models:
                missing = await living.missing(model)
                models[model] = f"no {' and no '.join(missing)}" if missing else "ok"
        except (PagemillError, TimeoutError):
            return Json(Ready("no broker"), 503)
        able = "ok" in models.values() and not context.draining
        ready = Ready("ok" if able else "draining" if context.draining else "not ready", models)
        return Json(ready, 200 if able else 503)

    async def version(_: Request, __: Caller) -> Response:
        return Json(Version(VERSION))

    async def metrics(_: Request, __: Caller) -> Response:
        told = prometheus.to_text(context.metrics.snapshot().series)
        return Response(told, media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        context.route("/health", health, public=True),
        context.route("/ready", ready, public=True),
        context.route("/version", version),
        context.route("/metrics", metrics),
    ]
