"""Input of a conversation: messages, commands, and images that a message names. Pure."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.multimodal import IMAGE

HELP = {
    "help": "show the commands",
    IMAGE: "PATH or URL: attach an image to the next message; @PATH in a message does the same",
    "system": "[TEXT]: set the system message; without a text, remove it",
    "model": "[NAME]: show or set the model",
    "params": "[NAME=VALUE ...]: show or set sampling parameters; NAME= removes one",
    "retry": "ask the last message again",
    "undo": "remove the last message and its answer",
    "resume": "continue an answer that was cut off",
    "history": "show the conversation",
    "save": "FILE: write the messages as JSON, in OpenAI's format",
    "load": "FILE: replace the messages with those of such a file",
    "requests": "show the request ids of this conversation",
    "quit": "leave the chat; Ctrl-D does the same",
}
NEED_ARGUMENT = {IMAGE, "save", "load"}
LONG_MESSAGES = (
    'A line that ends with \\ goes on in the next one. """ begins and ends a longer message.'
)

_BACKSLASH = "\\"
_QUOTES = '"""'
_IMAGE = re.compile(r'(?:(?<=\s)|^)@(?:"([^"]+)"|(\S+))[ \t]*')


class Command(NamedTuple):
    name: str
    argument: str


class Said(NamedTuple):
    """A message, and the paths of its images."""

    text: str
    images: list[str]


def is_open(text: str) -> bool:
    """Return whether a message goes on in the next line.

    A backslash at its end continues it, two of them do not. A message that begins with quotes goes
    on until a line ends with them.
    """
    text = text.strip()
    if text.startswith(_QUOTES):
        return len(text) < 2 * len(_QUOTES) or not text.endswith(_QUOTES)
    return text.endswith(_BACKSLASH) and not text.endswith(2 * _BACKSLASH)


def extend(text: str, line: str) -> str:
    """Return an open message with its next line."""
    is_quoted = text.lstrip().startswith(_QUOTES)
    return f"{text if is_quoted else text.rstrip().removesuffix(_BACKSLASH)}\n{line}"


def parse(text: str, is_image: Callable[[str], bool]) -> Command | Said | None:
    """Return what was entered; None for an empty text. Raises InvalidRequest.

    A message that begins with a slash is written with two slashes or in quotes. `@PATH` names an
    image if `is_image` says so, and stays a part of the text if not.
    """
    text = text.strip()
    if text.startswith(_QUOTES):
        return _parse_message(text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip(), is_image)
    if text.startswith("/") and not text.startswith("//"):
        name, *rest = re.split(r"\s", text[1:], maxsplit=1)
        argument = "".join(rest).strip()
        if name not in HELP:
            raise InvalidRequest(f"there is no command /{name}; /help shows them", field="command")
        if name in NEED_ARGUMENT and not argument:
            raise InvalidRequest(f"/{name} {HELP[name]}", field="command")
        return Command(name, argument)
    return _parse_message(text.removeprefix("/") if text.startswith("//") else text, is_image)


def _parse_message(text: str, is_image: Callable[[str], bool]) -> Said | None:
    if not text:
        return None
    images: list[str] = []

    def take(found: re.Match[str]) -> str:
        path = found[1] or found[2]
        if not is_image(path):
            return found[0]
        images.append(path)
        return ""

    rest = _IMAGE.sub(take, text)
    return Said(rest.strip(), images)


def parse_params(text: str) -> dict[str, Any]:
    """Return the parameters in `name=value name=value`; None for an empty value.

    A value is JSON, or else a string. Raises InvalidRequest.
    """
    params: dict[str, Any] = {}
    for pair in text.split():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"{pair}: parameters are written NAME=VALUE", field="params")
        params[name] = _parse_value(value)
    return params


def _parse_value(text: str) -> Any:
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
