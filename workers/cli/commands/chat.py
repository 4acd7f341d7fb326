"""The command `pagemill chat`."""

import asyncio
import sys
from pathlib import Path

from shared.errors import InvalidRequest
from workers.cli.broker import check_model, connected_to_writer
from workers.cli.chat import Chat
from workers.cli.options import ConfigFile, ModelName, NatsUrl, load
from workers.settings import login_of


def chat(
    *,
    model: ModelName = None,
    system: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Talk with a model. Ctrl-C interrupts an answer, Ctrl-D leaves, /help shows the commands.

    Without a terminal, each line of the input is a message or a command.

    Parameters
    ----------
    system
        System message of the conversation.
    """
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed: chat reads messages from it", field="stdin")
    name = asyncio.run(_find_model(config, nats, model))
    loaded = load(config)
    return Chat(login_of(loaded, given_url=nats), loaded, name, system).run()


async def _find_model(config: Path | None, nats: str | None, model: str | None) -> str:
    async with connected_to_writer(config, nats, model, "chat") as (bus, name):
        return await check_model(bus, load(config), name)
