"""What clients call the fields of what goes on the bus. Pure."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shared.errors import PagemillError
from shared.protocol.messages import ErrorInfo
from workers.gateway.http import errors

_SAMPLING = "sampling_params"
_TEMPLATE = "template_kwargs"

CLIENT_FIELDS: dict[str, dict[str, str]] = {
    "chat": {"items": "messages"},
    "completion": {
        "messages": "prompt",
        "prompt_token_ids": "prompt",
        "tokens": "prompt",
        "items": "prompt",
        "sampling_params.prompt_logprobs": "logprobs",
    },
    "generate": {"messages": "token_ids", "prompt_token_ids": "token_ids", "items": "features"},
}
"""By the kind of a JobRecord; what is not here has the same name."""


def translate_error(error: ErrorInfo, kind: str, options: Mapping[str, Any]) -> ErrorInfo:
    """With the field as the client has sent it, in the message as well if that begins with it.

    `options` are those of the request's JobRecord; `fields` of them has names of its own.
    """
    given = error.field or ""
    field = _renamed(given, CLIENT_FIELDS[kind] | options.get("fields", {}))
    if kind != "generate":
        field = "" if field == _SAMPLING else field.removeprefix(f"{_SAMPLING}.")
        if field.partition(".")[0] == _TEMPLATE:
            field = f"chat_{field}"
    message = error.message
    if given and message.startswith(f"{given}:"):
        message = f"{field}{message[len(given) :]}".removeprefix(":").lstrip()
    return msgspec.structs.replace(error, field=field or None, message=message)


@contextlib.contextmanager
def translated_errors(kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Raises what is raised inside as Failed, in the names of `translate_error`."""
    try:
        yield
    except PagemillError as error:
        raise errors.RequestFailed(
            translate_error(errors.info_of(error), kind, options), ""
        ) from error


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """By the longest beginning of the path that has another name; what it had inside is nothing
    that its client knows."""
    path = re.split(r"(?=[.\[])", field)
    for end in range(len(path), 0, -1):
        if (name := names.get("".join(path[:end]))) is not None:
            return name
    return field
