"""`pagemill ask`: a question from the command line, its answer on the terminal."""

import base64
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shared.bus import Bus
from shared.client import ask
from shared.config import split_path
from shared.errors import InvalidMedia, InvalidRequest
from shared.messages import (
    Failure,
    Finish,
    GenerateRequest,
    ImagePart,
    ImageURL,
    LogRecord,
    Message,
    TextPart,
    TokenChunk,
    to_json,
)
from shared.sampling import SamplingParams

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """What was given on the command line; `sampling` values of None were not."""

    model: str
    text: str
    images: Sequence[Path]
    sampling: dict[str, Any]


async def ask_and_print(question: Question, request_id: str, url: str, *, as_json: bool) -> int:
    """Returns the exit code: 0 for an answer, 1 for an error."""
    request = build_request(question)
    # Somebody waits at the terminal: a server that is not there is said at once.
    bus = await Bus.connect(url, "ask", CONNECT_TIMEOUT_S)
    code = 1
    try:
        async for record in ask(bus, request, request_id):
            _print_json(record) if as_json else _print_text(record)
            code = 0 if isinstance(record, Finish) else 1
    finally:
        await bus.close()
    return code


def build_request(question: Question) -> GenerateRequest:
    """Read the pictures and put everything into one request.

    Raises InvalidMedia for a file that cannot be read, InvalidRequest for a value out of range.
    """
    parts = [ImagePart(ImageURL(data_url(path))) for path in question.images]
    given = {name: value for name, value in question.sampling.items() if value is not None}
    try:
        sampling = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        what, field = split_path(str(error))
        raise InvalidRequest(f"{field}: {what}", field=field) from error
    return GenerateRequest(
        model=question.model,
        messages=[Message("user", [*parts, TextPart(question.text)])],
        sampling_params=sampling,
    )


def data_url(path: Path) -> str:
    """A file's bytes as a `data:` URL; what kind of picture it is, the server sees for itself."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidMedia(f"{path}: {error.strerror}", field="image") from error
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def _print_json(record: LogRecord) -> None:
    sys.stdout.write(to_json(record).decode() + "\n")
    sys.stdout.flush()


def _print_text(record: LogRecord) -> None:
    match record:
        case TokenChunk():
            sys.stdout.write("".join(choice.text for choice in record.choices))
        case Finish():
            sys.stdout.write("\n")
        case Failure():
            where = f" ({record.error.field})" if record.error.field else ""
            Console(stderr=True).print(
                f"[red]error[/] {record.error.code}{where}: {record.error.message}", highlight=False
            )
    sys.stdout.flush()
