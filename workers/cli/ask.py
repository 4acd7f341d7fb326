"""Implementation of `pagemill ask` and `pagemill follow`."""

import asyncio
import base64
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from shared.bus.bus import Bus
from shared.client import ask, cancel, follow
from shared.errors import InvalidMedia, InvalidRequest
from shared.protocol.encoding import to_json
from shared.protocol.records import (
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
)
from shared.protocol.requests import (
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from shared.protocol.sampling import SamplingParams
from shared.validation import split_validation_error

CONNECT_TIMEOUT_S = 2.0
EXIT_INTERRUPTED = 130

errors = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class AskOptions:
    """A question from the command line; a `sampling` value of None means that none was given."""

    model: str
    text: str
    images: Sequence[Path]
    sampling: dict[str, Any]
    timeout_s: float | None = None
    adapter: str | None = None


async def ask_and_print(
    question: AskOptions, request_id: str, url: str, *, as_json: bool, durable: bool
) -> int:
    """Return the exit code: 0 for an answer, 1 for an error, 130 after an interrupt.

    Ctrl-C cancels the request unless it is `durable`.
    """
    request = build_request(question)
    # A user waits at the terminal, so a server that is down is reported after a short time.
    bus = await Bus.connect(url, "ask", CONNECT_TIMEOUT_S)
    try:
        with _interruptible() as interrupted:
            return await _print_all(ask(bus, request, request_id), interrupted, as_json=as_json)
    except asyncio.CancelledError:
        if not durable:
            await cancel(bus, request_id)
            errors.print("\ncancelled")
        else:
            errors.print(f"\nthe request continues: pagemill follow {request_id}")
        return EXIT_INTERRUPTED
    finally:
        await bus.close()


async def follow_and_print(request_id: str, start: int, url: str, *, as_json: bool) -> int:
    """Do the same as `ask_and_print` for an earlier request, which Ctrl-C does not cancel."""
    bus = await Bus.connect(url, "follow", CONNECT_TIMEOUT_S)
    try:
        with _interruptible() as interrupted:
            return await _print_all(follow(bus, request_id, start), interrupted, as_json=as_json)
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    finally:
        await bus.close()


async def _print_all(
    records: AsyncIterator[LogRecord], interrupted: asyncio.Event, *, as_json: bool
) -> int:
    """Print records and return the exit code. Raises CancelledError once `interrupted` is set."""
    code = 1
    stop = asyncio.create_task(interrupted.wait())
    while True:
        step = asyncio.ensure_future(anext(records, None))
        await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            step.cancel()
            raise asyncio.CancelledError
        record = step.result()
        if record is None:
            return code
        _print_json(record) if as_json else _print_text(record)
        code = 0 if isinstance(record, Finish) else 1


@contextlib.contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """Make Ctrl-C set an event, so that the request can still be cancelled at the broker."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def build_request(question: AskOptions) -> GenerateRequest:
    """Read the images and build the request.

    Raises InvalidMedia for a file that cannot be read, InvalidRequest for a value out of range.
    """
    parts = [ImagePart(ImageURL(data_url(path))) for path in question.images]
    given = {name: value for name, value in question.sampling.items() if value is not None}
    try:
        sampling = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        reason, field = split_validation_error(error)
        raise InvalidRequest(f"{field}: {reason}", field=field) from error
    return GenerateRequest(
        model=question.model,
        messages=[Message("user", [*parts, TextPart(question.text)])],
        sampling_params=sampling,
        timeout_s=question.timeout_s,
        adapter=question.adapter,
    )


def data_url(path: Path) -> str:
    """Return a file as a `data:` URL; the server detects the format of the image."""
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
            print_error(record.error)
    sys.stdout.flush()


def print_error(error: ErrorInfo) -> None:
    """Print an error, escaped: it may quote the client, whose `[/INST]` is not markup."""
    field = f" ({error.field})" if error.field else ""
    errors.print(
        f"[red]error[/] {error.code}{escape(f'{field}: {error.message}')}", highlight=False
    )
