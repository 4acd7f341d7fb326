"""The connection of a command to the broker, and the model that is served there."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import is_listening
from shared.bus.login import Login
from shared.config.schema import Config
from shared.errors import Unavailable, UnknownModel
from shared.stage.pipelines import ENGINE
from shared.telemetry import logs
from workers import settings
from workers.cli.options import find_writer, load

# A user waits at the terminal, so a server that is down is reported after a short time.
CONNECT_TIMEOUT_S = 2.0
LOOPBACK = ("127.0.0.1", "localhost")
DEFAULT_PORT = 4222


@contextlib.asynccontextmanager
async def connected(
    login: Login, name: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncIterator[Bus]:
    """Yield the connection of `connect` for one command. Raises Unavailable after `timeout_s`."""
    if not structlog.is_configured():
        # Log lines of the connection would appear in the output. A command reports its errors.
        logs.configure_logging("error", role=name)
    bus = await connect(login, name, timeout_s)
    try:
        yield bus
    finally:
        await bus.close()


async def connect(login: Login, name: str, timeout_s: float = CONNECT_TIMEOUT_S) -> Bus:
    """Connect to the broker. Raises Unavailable after `timeout_s`."""
    try:
        return await Bus.connect(login, name, timeout_s)
    except Unavailable as error:
        if not _is_free_here(login.url):
            raise
        message = f"Pagemill is not running (no broker answers at {login}): start `pagemill up`"
        raise Unavailable(message) from error


def _is_free_here(url: str) -> bool:
    """Return whether a URL names a port of this machine, at which nothing listens."""
    place = urlsplit(url)
    return place.hostname in LOOPBACK and not is_listening(place.port or DEFAULT_PORT)


async def known_models(bus: Bus, config: Config) -> set[str]:
    """Return the names of the models that are configured or served."""
    beats = await bus.heartbeats.read()
    return {*config.models, *(name for beat in beats for name in beat.models)}


async def check_model(bus: Bus, config: Config, model: str) -> str:
    """Return `model` if it is configured or served. Raises UnknownModel, with a list, if not."""
    models = await known_models(bus, config)
    if model not in models:
        names = ", ".join(sorted(models))
        raise UnknownModel(f"there is no model {model}; there are: {names}", field="model")
    return model


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
