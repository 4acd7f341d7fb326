"""Expected answers of requests that end early are as long as the checks need, and not longer."""

from pathlib import Path

import pytest

from ops.chaos.expected_answers import LENGTH_STEP, Expected, expect, shortened
from ops.chaos.plan import Mix, Planned, Settings, make_request
from ops.chaos.run_config import write_run_config
from shared.protocol.records import (
    ChoiceDelta,
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
    Usage,
)
from shared.protocol.sampling import SamplingParams
from workers.settings import load_config

SETTINGS = Settings(renderer="fake", max_choices=1, mix=Mix(cancel=1.0))
CANCELLED = make_request(SETTINGS, 0)
FAILURE = Failure(1, 1, ErrorInfo("cancelled", "no", None, "client", False), [])


def chunk(num_tokens: int, choice: int = 0, end: bool = False) -> TokenChunk:
    tokens = ChoiceDelta(choice, 0, [1] * num_tokens, "", "length" if end else None)
    return TokenChunk(0, 1, [tokens])


def expected(planned: Planned, folder: Path) -> Expected:
    return expect(SETTINGS, load_config(write_run_config(SETTINGS, folder)), [planned])[planned.id]


@pytest.mark.parametrize("num_tokens", [0, 5, LENGTH_STEP])
def test_a_shortened_answer_begins_as_the_whole_one(num_tokens: int, tmp_path: Path) -> None:
    log: list[LogRecord] = [chunk(num_tokens), FAILURE]
    (whole,) = expected(CANCELLED, tmp_path).choices
    (short,) = expected(shortened(CANCELLED, log), tmp_path).choices
    assert len(whole.token_ids) == 900
    assert num_tokens < len(short.token_ids) < 900
    assert short.token_ids == whole.token_ids[: len(short.token_ids)]
    assert whole.text.startswith(short.text)


def test_the_longest_choice_counts() -> None:
    log = [chunk(5), chunk(70, choice=1), chunk(70, choice=1)]
    sampling = shortened(CANCELLED, log).request.sampling_params
    assert isinstance(sampling, SamplingParams)
    assert sampling.max_tokens == 3 * LENGTH_STEP


@pytest.mark.parametrize(
    "log", [[chunk(5, end=True)], [chunk(5), Finish(1, 1, Usage(1, 5), 1, [])]]
)
def test_an_answer_that_has_ended_is_compared_whole(log: list[LogRecord]) -> None:
    assert shortened(CANCELLED, log) == CANCELLED


def test_a_longer_log_than_the_request_allows_shortens_nothing() -> None:
    assert shortened(CANCELLED, [chunk(2000)]) == CANCELLED


def test_only_requests_that_end_early_are_shortened() -> None:
    plain = make_request(Settings(renderer="fake", mix=Mix(0, 0, 0, 0, 0)), 0)
    assert plain.behaviour == "plain"
    assert shortened(plain, [chunk(1)]) == plain
