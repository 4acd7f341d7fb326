"""Requests that end with their text alone, on a real server: `on_late: text`."""

import asyncio
import secrets

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.client import follow_output
from shared.errors import Cancelled, DeadlineExceeded, WorkerFailure
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.pipeline import TEXT
from shared.protocol.records import Failure, Finish, OutputEnd, OutputRecord, OutputSummary, Usage
from shared.state import output_ends
from shared.state.token_log import LogWriter, cut_outputs, end_request, finish_request

LATE = DeadlineExceeded("too late")
SPOKEN = OutputSummary(units={"frames": 7})


@pytest.fixture
async def request_id(bus: Bus) -> str:
    """A request with complete codes and the beginning of its sound."""
    name = f"t-{secrets.token_hex(6)}"
    await output_ends.begin(bus, name, [TEXT, "codes", "audio"])
    codes = await LogWriter.open(bus, name, 1, "codes")
    await codes.codes(0, [[1]])
    await codes.end(SPOKEN)
    audio = await LogWriter.open(bus, name, 1, "audio")
    await audio.audio(0, b"\0\0", 24_000)
    return name


async def output(bus: Bus, request_id: str, name: str) -> list[OutputRecord]:
    return [record async for record in follow_output(bus, request_id, name)]


async def end_text(bus: Bus, request_id: str) -> bool:
    """Note the end of the text as its stage does; return whether that ended the request."""
    ends = await output_ends.add(bus, request_id, TEXT, OutputSummary(Usage(3, 4), 1))
    if output_ends.is_complete(ends):
        await finish_request(bus, request_id, 1, ends.ended)
    return output_ends.is_complete(ends)


@pytest.mark.parametrize("is_text_first", [True, False])
async def test_the_text_ends_the_request_without_its_speech(
    bus: Bus, request_id: str, is_text_first: bool
) -> None:
    if is_text_first:
        assert not await end_text(bus, request_id)
    for _ in range(2):  # A second worker repeats what the first one may have died in.
        assert await cut_outputs(bus, request_id, 1, LATE, []) == is_text_first
    if not is_text_first:
        assert await end_text(bus, request_id)
    (finish,) = await read_log(bus, request_id)
    assert isinstance(finish, Finish)
    assert finish.usage == Usage(3, 4)
    # The codes were complete, though their stage had not noted that yet.
    assert finish.outputs["codes"] == SPOKEN
    error = finish.outputs["audio"].error
    assert error is not None
    assert error.code == "deadline_exceeded"
    _, end = await output(bus, request_id, "audio")
    assert isinstance(end, OutputEnd)
    assert end.cut
    assert end.summary.error == error


async def test_a_request_that_is_cancelled_meanwhile_ends_once(bus: Bus, request_id: str) -> None:
    await end_text(bus, request_id)
    await asyncio.gather(
        cut_outputs(bus, request_id, 1, LATE, []),
        end_request(bus, request_id, 1, Cancelled("cancelled"), []),
    )
    assert len(await read_log(bus, request_id)) == 1
    assert len(await output(bus, request_id, "audio")) == 2


async def test_outputs_that_were_cut_for_an_error_end_with_one(bus: Bus, request_id: str) -> None:
    """The worker that cancelled the request has died before its last record."""
    other = f"{request_id}-2"
    await output_ends.begin(bus, other, [TEXT, "audio"])
    await end_text(bus, other)
    end = OutputEnd(0, 1, OutputSummary(), cut=True)
    await bus.append(subjects.append(other, "audio"), to_json(end), 0)
    assert await cut_outputs(bus, other, 1, WorkerFailure("failed"), [])
    (failure,) = await read_log(bus, other)
    assert isinstance(failure, Failure)
