"""Translation of bus field names into the client's, for error messages. Pure."""

import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from shared.errors import PagemillError
from shared.protocol.records import ErrorInfo
from workers.gateway.core.assembler import PROMPT_FIELDS
from workers.gateway.http import errors

_SAMPLING = "sampling_params"
_TEMPLATE = "template_kwargs"

CLIENT_FIELDS: dict[str, dict[str, str]] = {
    "chat": {"items": "messages", "outputs": "modalities", "voice": "audio.voice"},
    "completion": {
        "messages": "prompt",
        "prompt_token_ids": "prompt",
        "tokens": "prompt",
        "items": "prompt",
        "sampling_params.prompt_logprobs": "logprobs",
    },
    "demo": {"prompt_token_ids": "prompt", "tokens": "prompt"},
    "embedding": {
        **dict.fromkeys(PROMPT_FIELDS, "input"),
        "embedding.dimensions": "dimensions",
        "embedding": "model",
    },
    "generate": {"messages": "token_ids", "prompt_token_ids": "token_ids", "items": "features"},
    "images": {
        "image.size": "size",
        "image.n": "n",
        "image.steps": "num_inference_steps",
        "image.guidance": "guidance_scale",
        "image.negative_prompt": "negative_prompt",
        "outputs": "model",
    },
    "rerank": {**dict.fromkeys(PROMPT_FIELDS, "documents"), "embedding": "model"},
    "response": {
        **dict.fromkeys(PROMPT_FIELDS, "input"),
        "items": "input",
        "sampling_params.structured_outputs": "text.format",
        "sampling_params.max_tokens": "max_output_tokens",
    },
    "speech": {"given_text": "input", "outputs": "model"},
    "transcription": dict.fromkeys((*PROMPT_FIELDS, "items", "url"), "file"),
    "score": {**dict.fromkeys(PROMPT_FIELDS, "text_2"), "embedding": "model"},
}
"""Client's field by bus field, for each kind of RequestRecord. Others have the same name."""


def translate_error(error: ErrorInfo, kind: str, fields: Mapping[str, str]) -> ErrorInfo:
    """Return the error with the field that the client has sent, also at the start of its message.

    `fields` are the client's names of fields that this request has renamed.
    """
    bus_field = error.field or ""
    field = client_field_of(bus_field, kind, fields)
    if kind != "generate":
        field = "" if field == _SAMPLING else field.removeprefix(f"{_SAMPLING}.")
        if field.partition(".")[0] == _TEMPLATE:
            field = f"chat_{field}"
    message = error.message
    if bus_field and message.startswith(f"{bus_field}:"):
        message = f"{field}{message[len(bus_field) :]}".removeprefix(":").lstrip()
    return msgspec.structs.replace(error, field=field or None, message=message)


def client_field_of(bus_field: str, kind: str, fields: Mapping[str, str]) -> str:
    """Return the name that the client has for a bus field; the arguments are as above."""
    return _renamed(bus_field, {**CLIENT_FIELDS[kind], **fields})


@contextlib.contextmanager
def translated_errors(kind: str, fields: Mapping[str, str]) -> Iterator[None]:
    """Raise every error inside as RequestFailed, translated by `translate_error`."""
    try:
        yield
    except PagemillError as error:
        info = translate_error(errors.info_of(error), kind, fields)
        raise errors.RequestFailed(info, "") from error


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """Return the client's name for the longest prefix of the path that has one.

    The rest of the path is dropped, because the client does not know the structure inside.
    """
    path = re.split(r"(?=[.\[])", field)
    for end in range(len(path), 0, -1):
        if (name := names.get("".join(path[:end]))) is not None:
            return name
    return field
