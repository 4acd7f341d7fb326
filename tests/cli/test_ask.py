"""Answers in the terminal."""

import io
from collections.abc import AsyncIterator

import pytest

from shared.protocol.records import ChoiceDelta, Finish, LogRecord, TokenChunk, Usage
from tests.cli.fake_terminal import FakeTerminal
from workers.cli.ask import print_records
from workers.cli.token_rate import TokenRate

TEXT = "a\x1b]52;c;x\x07\tb\n"


async def records() -> AsyncIterator[LogRecord]:
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
    assert await print_records(records(), as_json=False) == 0
    assert out.getvalue() == text


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
