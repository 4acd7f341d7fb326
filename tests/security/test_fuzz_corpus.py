"""Inputs that the fuzzer has recorded: each of them is decoded, or gets one of the known errors."""

import pytest

from ops.fuzz_decoders.corpus import CORPUS, read_corpus
from ops.fuzz_decoders.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzer_has_found_is_answered(name: str) -> None:
    recorded = read_corpus(name)
    assert recorded
    for data in recorded:
        TARGETS[name].answer(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_fuzzer_begins_with_messages_that_are_valid(name: str) -> None:
    """Without a valid message, it would never pass the first checks."""
    target = TARGETS[name]
    assert any(not isinstance(target.answer(seed), target.answers) for seed in target.seeds())


def test_nothing_else_is_recorded_and_it_stays_small() -> None:
    files = list(CORPUS.iterdir())
    assert {file.stem for file in files} == set(TARGETS)
    assert sum(file.stat().st_size for file in files) < 300_000
