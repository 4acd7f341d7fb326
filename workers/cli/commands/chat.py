"""The command `pagemill chat`."""

import sys

from shared.errors import InvalidRequest
from shared.telemetry import logs
from workers.cli.chat import Chat
from workers.cli.options import ConfigFile, ModelName, NatsUrl, find_login_and_model


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
    login, model = find_login_and_model(config, nats, model)
    # Log lines of the connection would appear in the middle of an answer.
    logs.configure_logging("error", role="chat")
    return Chat(login, model, system).run()
