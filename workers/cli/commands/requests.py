"""Commands about one request: `pagemill ask`, `follow`, `cancel` and `where`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec.structs import replace

from shared import client
from shared.bus.bus import Bus
from shared.errors import Cancelled, InvalidRequest, NotFound
from shared.protocol.names import split_id
from shared.protocol.pipeline import TEXT
from shared.protocol.reading import RequestStatus
from shared.protocol.records import AudioChunk, Finish, ImageRecord, LogRecord, VideoRecord
from shared.protocol.requests import OnLate
from shared.state import request_status, response_status
from shared.state.response_status import FoundResponse
from workers.cli.ask import build_request, media_parts, print_answer, print_records, with_media
from workers.cli.audited import audited
from workers.cli.broker import connected, connected_to_writer
from workers.cli.commands.painting import save_images
from workers.cli.inputs import read_input
from workers.cli.options import (
    ConfigFile,
    Json,
    ModelName,
    NatsUrl,
    NewId,
    RequestId,
    find_login,
    load,
)
from workers.cli.outputs import SPEECH_FILE, NewFile, check_output, free_path
from workers.cli.sound import find_audio, save_sound, while_saving
from workers.cli.terminal import (
    EXIT_INTERRUPTED,
    format_time,
    note_unmarked,
    print_json,
    print_line,
    print_note,
    print_rows,
)

# Time in which another terminal may send the request.
ARRIVAL_S = 1.0
# Coordinators cancel within milliseconds, unless there is none.
CANCEL_S = 5.0
LOOK_S = 0.1

EXIT_ENDED = 2

SOUND = "a sound"
KINDS: Mapping[type, str] = {AudioChunk: SOUND, ImageRecord: "an image", VideoRecord: "a video"}
"""Words for the media of outputs, by their records."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of `pagemill ask` for sampling."""

    max_tokens: int | None = None
    """Maximum number of tokens in the answer."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. By default as configured for the model."""
    seed: int | None = None
    """Seed of the sampling, which makes the answer repeatable."""

    def given(self) -> dict[str, float]:
        """Return the options that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Options of `pagemill ask` for a spoken answer."""

    speak: bool = False
    """Have the answer spoken as well, and write the sound to a WAV file."""
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None
    """WAV file that --speak writes; by default speech.wav, or with a number if it exists."""
    voice: str | None = None
    """Name of one of the model's voices; by default the first one."""
    on_late: OnLate = "fail"
    """Treatment of a request if its speech fails or is late: `fail`, or `text` to end it with the
    text alone, provided that the text is complete."""


async def ask(
    question: str,
    /,
    *,
    model: ModelName = None,
    adapter: str | None = None,
    sampling: SamplingOptions = SamplingOptions(),
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None,
    json: bool = False,
    durable: bool = False,
    speech: SpeechOptions = SpeechOptions(),
    request_id: NewId = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Ask a running Pagemill, and stream the answer to the terminal. Ctrl-C cancels the request.

    Parameters
    ----------
    question
        The text of the question. @FILE in it adds an image, a sound, a video, a PDF file or a
        text, and @- reads one from stdin; - alone is the text of stdin.
    adapter
        Name of one of the model's LoRA adapters; by default none.
    timeout_s
        Maximum seconds from acceptance to the end of the answer; by default as configured.
    json
        Print the records of the token log, one JSON object per line.
    durable
        Do not cancel the request when Ctrl-C ends this command.
    request_id
        Id of the request; with the id of an earlier request, the command prints its answer.
    """
    spoken = ""
    if speech.speak:
        model, spoken = find_audio(load(config), model)
    params = sampling.given()
    text, media = read_input(question)
    note_unmarked(question)
    request = build_request(model or "", text, [], params, timeout_s, adapter)
    if speech.speak:
        outputs, on_late = [TEXT, spoken], speech.on_late
        request = replace(request, outputs=outputs, voice=speech.voice, on_late=on_late)
    request_id = request_id or client.new_request_id()
    async with contextlib.AsyncExitStack() as stack:
        output = (speech.output or free_path(SPEECH_FILE)) if speech.speak else None
        file = None if output is None else stack.enter_context(NewFile(output))
        connecting = connected_to_writer(config, nats, model, "ask")
        bus, name = await stack.enter_async_context(connecting)
        request = replace(request, model=name)
        parts = await media_parts(bus, media)
        records = client.ask(bus, with_media(request, parts), request_id, sampling=params)
        if file is not None:
            records = while_saving(bus, records, request_id, spoken, file)
        files = [medium.name for medium in media]
        return await print_answer(
            bus, request_id, records, as_json=json, output=output, durable=durable, files=files
        )


async def follow(
    request_id: RequestId,
    /,
    *,
    start: Annotated[int, Parameter(name=["--from"])] = 0,
    wait_s: Annotated[float, Parameter(name="--wait", validator=Number(gte=0))] = ARRIVAL_S,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the answer of an earlier request, and wait for the rest of it.

    Parameters
    ----------
    start
        Index of the first record to print.
    wait_s
        Seconds to wait for a request that does not exist yet.
    output
        File for an answer that is an image, a video or a sound; numbers follow the names of several
        images.
    json
        Print the records of the token log, one JSON object per line.
    """
    if output is not None:
        check_output(output)
    async with connected(find_login(config, nats), "follow") as bus:
        try:
            status = await _find(bus, request_id, wait_s)
            if status.state == "unknown":
                raise _unknown(status)
            name = status.request_id
            records = _while_saving(bus, client.follow(bus, name, start), name, output)
            return await print_records(records, name, as_json=json, output=output)
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED


async def _while_saving(
    bus: Bus, records: AsyncIterator[LogRecord], request_id: str, file: Path | None
) -> AsyncGenerator[LogRecord, None]:
    """Yield the records of a request, and write its outputs other than text to a file.

    Without a file, print how to get them. Raises InvalidRequest for a file if there are none.
    """
    async for record in records:
        yield record
        if not isinstance(record, Finish):
            continue
        if file is not None and not record.outputs:
            raise InvalidRequest("the answer is a text, which -o does not save", field="output")
        for name in record.outputs:
            kind = await _kind_of(bus, request_id, name)
            if kind is None:
                continue
            if file is None:
                print_note(f"the answer has {kind}: pagemill follow {request_id} -o FILE saves it")
            elif kind == SOUND:
                await save_sound(bus, request_id, name, file)
            else:
                await save_images(bus, client.follow_output(bus, request_id, name), file)


async def _kind_of(bus: Bus, request_id: str, output: str) -> str | None:
    """Return the words for the medium of an output; None for a text."""
    async with contextlib.aclosing(client.follow_output(bus, request_id, output)) as records:
        async for record in records:
            if (kind := KINDS.get(type(record))) is not None:
                return kind
    return None


async def cancel(
    request_id: RequestId, /, *, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Cancel a request in any stage. Its answer ends with the error `cancelled`.

    The exit code is 0 if the request is cancelled, 1 if it is unknown, and 2 if it has ended in
    another way.
    """
    async with connected(find_login(config, nats), "cancel") as bus:
        before = await _find(bus, request_id, ARRIVAL_S)
        if before.has_ended:
            return _print_end(before, "already ", as_json=json)
        if before.state == "unknown":
            raise _unknown(before)
        request_id = before.request_id
        await _cancel(bus, request_id)
        after = await _find(bus, request_id, CANCEL_S, lambda status: status.has_ended)
    if after.has_ended or json:
        return _print_end(after, as_json=json)
    print_line(f"{request_id} is not cancelled yet: a coordinator cancels it as soon as one runs")
    return 0


async def _cancel(bus: Bus, request_id: str) -> None:
    _, tenant = split_id(request_id)
    async with audited(bus, "cancel", request_id, tenant):
        await client.cancel(bus, request_id)


async def _find(
    bus: Bus,
    request_id: str,
    wait_s: float,
    is_enough: Callable[[RequestStatus], bool] = lambda status: status.state != "unknown",
) -> RequestStatus:
    """Poll the status of a request until `is_enough`, for at most `wait_s`, and return it.

    An id without a tenant is also found among all tenants.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        status = await request_status.find_any_tenants(bus, request_id)
        if is_enough(status) or loop.time() >= deadline:
            return status
        await asyncio.sleep(LOOK_S)


def _unknown(status: RequestStatus) -> NotFound:
    return NotFound(f"no request {status.request_id} is known: {status.why}", field="request_id")


def _print_end(status: RequestStatus, when: str = "", *, as_json: bool) -> int:
    """Print the end of a request, and return the exit code of `pagemill cancel`."""
    if as_json:
        print_json(status)
        is_other = status.has_ended and status.error_code != Cancelled.code
        return EXIT_ENDED if is_other else 0
    if status.error_code == Cancelled.code:
        print_line(f"{status.request_id} is {when}cancelled")
        return 0
    print_line(f"{status.request_id} has {when}{status.state}: {status.why}")
    return EXIT_ENDED


async def where(
    request_id: RequestId, /, *, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print the status of a request or a response: its stage, its waiting time, and the reason."""
    async with connected(find_login(config, nats), "where") as bus:
        response = await response_status.find_any_tenants(bus, request_id)
        if response is not None:
            print_json(response) if json else _print_response(response)
            return 0
        status = await request_status.find_any_tenants(bus, request_id)
    print_json(status) if json else _print_status(status)
    return 0 if status.state != "unknown" else 1


def _print_response(response: FoundResponse) -> None:
    rows = {
        "state": response.state.replace("_", " "),
        "steps": response.steps,
        "turn": response.turn,
        "call": response.call,
        "waiting": f"{response.waits_s:.1f} s since the last step",
        "why": response.why,
    }
    print_rows(rows)


def _print_status(status: RequestStatus) -> None:
    rows = {
        "state": status.state.replace("_", " "),
        "model": status.model,
        "tenant": split_id(status.request_id)[1] or None,
        "stage": status.stage,
        "worker": status.worker,
        "attempt": status.attempt,
        "waiting": None if status.waits_s is None else f"{status.waits_s:.1f} s in this stage",
        "records": status.records,
        "why": status.why,
    }
    print_rows(rows)
    for attempt in status.attempts:
        print_line(
            f"         {format_time(attempt.began_ms)} {attempt.worker} delivery {attempt.number}"
            f" {attempt.outcome.replace('_', ' ')}"
        )
