"""Answers in the terminal."""

import io
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.protocol.records import ChoiceDelta, Finish, LogRecord, TokenChunk, Usage
from shared.state.log_reader import LogUnreadable
from tests.cli.fake_terminal import FakeTerminal
from workers.cli.ask import print_records
from workers.cli.token_rate import TokenRate

TEXT = "a\x1b]52;c;x\x07\tb\n"


async def records() -> AsyncGenerator[LogRecord, None]:
    yield TokenChunk(0, 1, [ChoiceDelta(0, 0, [1], TEXT)])
    yield Finish(1, 1, Usage(1, 1), 0, [])


@pytest.mark.parametrize(
    ("out", "text"),
    [(FakeTerminal(), "a\ufffd]52;c;x\ufffd\tb\n\n"), (io.StringIO(), f"{TEXT}\n")],
)
async def test_a_text_does_not_steer_the_terminal_and_a_pipe_has_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, out: io.StringIO, text: str
) -> None:
    monkeypatch.setattr("sys.stdout", out)
    assert await print_records(records(), "r", as_json=False) == 0
    assert out.getvalue() == text


async def unreadable() -> AsyncGenerator[LogRecord, None]:
    yield TokenChunk(0, 1, [ChoiceDelta(0, 0, [1], "a")])
    raise LogUnreadable("the broker did not answer a read of TOKENS")


async def test_a_server_that_stops_leaves_the_command_that_continues() -> None:
    with pytest.raises(Unavailable) as stopped:
        await print_records(unreadable(), "r1", as_json=False, output=Path("my c.png"))
    command = "pagemill follow r1 -o 'my c.png'"
    assert stopped.value.message == f"the server has stopped; the request is stored: {command}"


def test_a_rate_counts_the_tokens_after_the_first_ones_and_needs_16() -> None:
    rate = TokenRate()
    for at_s in (10.0, 10.5, 11.0):
        rate.add(5, at_s)
    assert str(rate) == "-"
    rate.add(1, 11.1)
    assert str(rate) == "10"
    at_once = TokenRate()
    at_once.add(16, 10.0)
    assert str(at_once) == "-"
