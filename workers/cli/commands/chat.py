"""The command `pagemill chat`."""

import sys

from shared.errors import InvalidRequest
from shared.telemetry import logs
from workers.cli.chat import state_file
from workers.cli.chat.connection import Connection
from workers.cli.chat.conversation import Conversation
from workers.cli.chat.session import Session
from workers.cli.options import ConfigFile, ModelName, NatsUrl, find_login_and_model


def chat(
    *,
    model: ModelName = None,
    system: str | None = None,
    resume: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Talk with a model. Ctrl-C interrupts an answer, Ctrl-D leaves, /help shows the commands.

    Without a terminal, each line of the input is a message or a command.

    Parameters
    ----------
    system
        System message of the conversation.
    resume
        Continue the latest conversation, and its answer if that is unfinished.
    """
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed: chat reads messages from it", field="stdin")
    login, default_model = find_login_and_model(config, nats, model)
    path = state_file.find_path()
    conversation = state_file.read(path) if resume else Conversation(default_model)
    conversation.model = model or conversation.model
    conversation.system = system if system is not None else conversation.system
    # Log lines of the connection would stand in the middle of an answer.
    logs.configure_logging("error", role="chat")
    with Connection(login) as connection:
        return Session(conversation, connection, path).run(resume=resume)
