"""Hostile input files, end to end: one clear error with the line, and a batcher whose memory stays
flat."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.batches.input_file import MAX_ERRORS
from shared.errors import MAX_MESSAGE_LEN
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl, results_of
from tests.gateway.conftest import Process
from tests.support.waiting import until

MIB = 2**20
LONG_MIB = 100
MAX_GROWTH_MIB = 48
NUM_LARGE, LARGE_MIB, MAX_LARGE_GROWTH_MIB = 60, 3, 110
SECTIONS: dict[str, Any] = {"batch": {"max_lines": 5000}}
GOOD = jsonl([chat_line(0)])
LONG_NUMBER = jsonl([chat_line(1, url=1234)]).replace(b"1234", b"1" * 5000)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("questions.jsonl", GOOD)
    return file.getvalue()


def peak_mib(process: Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


async def errors_of(client: AsyncOpenAI, content: bytes) -> list[tuple[str | None, int | None]]:
    batch = await ended(client, (await begin(client, content)).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    for error in batch.errors.data or []:
        assert error.message
        assert len(error.message) <= MAX_MESSAGE_LEN + 1
    return [(error.code, error.line) for error in batch.errors.data or []]


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"\n", "empty_file", None),
        (zipped(), "invalid_file", 1),
        (GOOD.decode().encode("utf-16"), "invalid_file", 1),
        (b"\xef\xbb\xbf" + GOOD, "invalid_file", 1),
        (GOOD + GOOD.replace(b"line", b"\xff\xfe"), "invalid_json_line", 2),
        (GOOD + b"\r\n" + jsonl([chat_line(1)]), "blank_line", 2),
        (GOOD + GOOD, "duplicate_custom_id", 2),
        (GOOD + GOOD.replace(b'"method"', b'"custom_id": "x", "method"'), "invalid_line", 2),
        (GOOD + LONG_NUMBER * 2, "duplicate_custom_id", 3),
        (GOOD + jsonl([chat_line(1, tools=json.loads("[" * 99 + "]" * 99))]), "invalid_line", 2),
    ],
)
async def test_a_hostile_file_has_one_error_with_its_line(
    client: AsyncOpenAI, batcher: Process, content: bytes, code: str, line: int | None
) -> None:
    assert await errors_of(client, content) == [(code, line)]


def long_line() -> Iterator[bytes]:
    yield GOOD
    for _ in range(LONG_MIB):
        yield b"x" * MIB


async def test_a_long_line_is_refused_and_not_held(client: AsyncOpenAI, batcher: Process) -> None:
    assert await errors_of(client, GOOD + b"no JSON\n") == [("invalid_json_line", 2)]
    before_mib = peak_mib(batcher)
    assert await errors_of(client, b"".join(long_line())) == [("line_too_long", 2)]
    assert peak_mib(batcher) - before_mib < MAX_GROWTH_MIB


@pytest.mark.long
async def test_large_lines_that_wait_are_few(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    content = jsonl([chat_line(n, user="x" * LARGE_MIB * MIB) for n in range(NUM_LARGE)])
    before_mib = peak_mib(batcher)
    with rig.model.held_after(0):
        batch = await begin(client, content)
        # Meanwhile a batcher without a limit would read all lines.
        for number in range(1, 6):
            rig.model.num_free += 1
            await until(partial(has_answers, client, batch.id, number))
    assert (await ended(client, batch.id)).status == "completed"
    assert peak_mib(batcher) - before_mib < MAX_LARGE_GROWTH_MIB


async def has_answers(client: AsyncOpenAI, batch_id: str, number: int) -> bool:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts is not None and counts.completed >= number


async def test_errors_with_long_names_fit_into_the_log(
    client: AsyncOpenAI, batcher: Process
) -> None:
    lines = [chat_line(n) | {"body": {"model": "x" * 200_000}} for n in range(MAX_ERRORS + 1)]
    errors = await errors_of(client, jsonl(lines))
    assert errors == [("model_not_found", number) for number in range(1, MAX_ERRORS + 1)]


async def test_lines_with_crlf_run(client: AsyncOpenAI, batcher: Process) -> None:
    content = jsonl([chat_line(n) for n in range(3)]).replace(b"\n", b"\r\n")
    batch = await ended(client, (await begin(client, content)).id)
    assert batch.status == "completed"
    assert (await results_of(client, batch.output_file_id)).keys() == {
        f"line-{n}" for n in range(3)
    }


async def test_an_empty_file_is_refused(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    assert await errors_of(client, b"") == [("empty_file", None)]
