"""Requests of the command line: reads their media, and prints their answers."""

import asyncio
import base64
import contextlib
import re
import shlex
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared import client
from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.helpers.validation import invalid_request
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO, FileKind
from shared.protocol.records import ErrorInfo, Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import (
    AudioPart,
    AudioURL,
    DocumentPart,
    DocumentURL,
    GenerateRequest,
    ImagePart,
    ImageURL,
    MediaContent,
    Message,
    TextPart,
    VideoPart,
    VideoURL,
)
from shared.protocol.sampling import SamplingParams
from shared.state.log_reader import LogUnreadable
from workers.cli.inputs import Medium, read_media
from workers.cli.terminal import (
    EXIT_INTERRUPTED,
    cancelled_by_signals,
    errors,
    print_json,
    print_note,
    print_wrapped,
    write_text,
)

# Several such files fit into one message.
MAX_INLINE = 2**20
_CONTENT = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")


async def print_records(
    records: AsyncGenerator[LogRecord, None],
    request_id: str,
    *,
    as_json: bool,
    output: Path | None = None,
    files: Sequence[str] = (),
) -> int:
    """Print records and return the exit code: 0 for an answer, 1 for an error.

    An answer without text ends without a line break. `output` is as in `naming_request`, and
    `files` as in `print_error`.

    Raises CancelledError on Ctrl-C, and Unavailable.
    """
    record, has_text = None, False
    with cancelled_by_signals(), naming_request(request_id, output):
        async with contextlib.aclosing(records):
            async for record in records:
                has_text = has_text or isinstance(record, TokenChunk)
                if as_json:
                    print_json(record)
                elif has_text or not (isinstance(record, Finish) and record.outputs):
                    _print_text(record, files)
    return 0 if isinstance(record, Finish) else 1


@contextlib.contextmanager
def naming_request(request_id: str, output: Path | None = None) -> Iterator[None]:
    """Raise Unavailable with the command that continues, if the broker stops during the answer.

    `output` is the file of an answer that is not a text.
    """
    try:
        yield
    except LogUnreadable as error:
        command = f"pagemill follow {request_id}"
        if output is not None:
            command += f" -o {shlex.quote(str(output))}"
        raise Unavailable(f"the server has stopped; the request is stored: {command}") from error


async def print_answer(
    bus: Bus,
    request_id: str,
    records: AsyncGenerator[LogRecord, None],
    *,
    as_json: bool,
    output: Path | None = None,
    durable: bool = False,
    files: Sequence[str] = (),
) -> int:
    """Print a new request's id and its records, and return the exit code.

    Ctrl-C cancels the request, unless it is `durable`. `output` is as in `naming_request`, and
    `files` as in `print_error`. Raises Unavailable.
    """
    # Records do not contain the id, and it is needed to follow, find or cancel the request.
    print_note(f"request {request_id}")
    try:
        return await print_records(records, request_id, as_json=as_json, output=output, files=files)
    except asyncio.CancelledError:
        if not durable:
            await client.cancel(bus, request_id)
            print_note("\ncancelled")
        else:
            print_note(f"\nthe request continues: pagemill follow {request_id}")
        return EXIT_INTERRUPTED


def build_request(
    model: str,
    text: str,
    images: Sequence[Path],
    sampling: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    adapter: str | None = None,
) -> GenerateRequest:
    """Read the images and build the request.

    Its sampling parameters are checked, but a value from `sampling` looks the same as an equal
    default: pass `sampling` to `client.ask` as well.

    Raises InvalidMedia for a file that cannot be read, InvalidRequest for a value out of range.
    """
    parts = [ImagePart(ImageURL(data_url(path))) for path in images]
    try:
        params = msgspec.convert(sampling or {}, SamplingParams)
    except msgspec.ValidationError as error:
        raise invalid_request(error, SamplingParams) from error
    return GenerateRequest(
        model=model,
        messages=[Message("user", [*parts, TextPart(text)])],
        sampling_params=params,
        timeout_s=timeout_s,
        adapter=adapter,
    )


def with_media(request: GenerateRequest, parts: Sequence[MediaContent]) -> GenerateRequest:
    """Return the request of `build_request` with these parts before its text."""
    if not parts:
        return request
    assert request.messages is not None
    (message,) = request.messages
    assert isinstance(message.content, list)
    *images, text = message.content
    message = msgspec.structs.replace(message, content=[*images, *parts, text])
    return msgspec.structs.replace(request, messages=[message])


async def media_parts(
    bus: Bus, media: Iterable[Medium], *, max_inline: int = MAX_INLINE
) -> list[MediaContent]:
    """Return the parts of media. Those with more bytes than `max_inline` are stored first.

    Raises Unavailable.
    """
    parts: list[MediaContent] = []
    for medium in media:
        is_small = len(medium.data) <= max_inline
        url = _encode(medium.data) if is_small else await client.pin_media(bus, medium.data)
        parts.append(_part_of(medium.kind, url))
    return parts


def _part_of(kind: FileKind, url: str) -> MediaContent:
    if kind == VIDEO:
        return VideoPart(VideoURL(url))
    if kind == AUDIO:
        return AudioPart(AudioURL(url))
    return DocumentPart(DocumentURL(url)) if kind == DOCUMENT else ImagePart(ImageURL(url))


def data_url(path: Path) -> str:
    """Return a file as a `data:` URL; the server detects its format."""
    return _encode(read_media(path, IMAGE))


def _encode(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def name_place(field: str, files: Sequence[Sequence[str]]) -> str:
    """Return the name of the file that a field means, or the field. `files` are by message."""
    content = _CONTENT.match(field)
    try:
        return field if content is None else files[int(content[1])][int(content[2])]
    except IndexError:
        return field


def _print_text(record: LogRecord, files: Sequence[str]) -> None:
    match record:
        case TokenChunk():
            write_text("".join(choice.text for choice in record.choices))
        case Finish():
            write_text("\n")
        case Failure():
            print_error(record.error, files)


def print_error(error: ErrorInfo, files: Sequence[str] = ()) -> None:
    """Print an error without markup: it may quote a client, such as `[/INST]`.

    `files` are the names of the media in the order of the content, for the place of the error.
    """
    place = name_place(error.field, [files]) if error.field else None
    field = f" ({place})" if place and not error.message.startswith(f"{place}: ") else ""
    print_wrapped(errors, f"{error.code}{field}: {error.message}", mark="error")
