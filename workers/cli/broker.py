"""The connection of a command to the broker, and the model that is served there."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.stage.pipelines import ENGINE
from shared.telemetry import logs
from workers import settings
from workers.cli.options import find_writer, load

# A user waits at the terminal, so a server that is down is reported after a short time.
CONNECT_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def connected(
    login: Login, name: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncIterator[Bus]:
    """Connect to the broker for one command. Raises Unavailable after `timeout_s`."""
    if not structlog.is_configured():
        # Log lines of the connection would appear in the output. A command reports its errors.
        logs.configure_logging("error", role=name)
    bus = await Bus.connect(login, name, timeout_s)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def connected_to_writer(
    config: Path | None, nats: str | None, model: str | None, name: str
) -> AsyncIterator[tuple[Bus, str]]:
    """Connect like `connected`, and yield the connection and the model, by default a writer.

    It is the only configured one, or else the only one that is served. Raises InvalidRequest if
    there is none or several.
    """
    loaded = load(config)
    async with connected(settings.login_of(loaded, given_url=nats), name) as bus:
        beats = [] if model else await bus.heartbeats.read()
        engines = [beat for beat in beats if beat.role == ENGINE and beat.stage in ("", ENGINE)]
        served = {name for beat in engines for name in beat.models}
        yield bus, model or find_writer(loaded, served)
