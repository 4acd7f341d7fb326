"""Drafts equal the results of a plain search over all earlier tokens; failing ones cost little."""

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.core.ngram_drafter import CREDIT_PER_STEP, DraftBudget, NgramDrafter, NgramIndex

# Few different tokens, so that much comes again.
tokens = st.lists(st.integers(0, 3), max_size=40)
lengths = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


def search(token_ids: list[int], min_ngram: int, max_ngram: int) -> int | None:
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                return end
    return None


@given(st.lists(tokens, max_size=6), lengths)
def test_the_index_finds_what_a_search_finds(parts: list[list[int]], ngrams: list[int]) -> None:
    """However much has come at once."""
    index, token_ids = NgramIndex(*ngrams), []
    for part in parts:
        token_ids += part
        assert index.find(token_ids) == search(token_ids, *ngrams)


@given(tokens, lengths, st.integers(1, 8), st.integers(0, 8))
def test_the_draft_is_what_followed_the_same_ngram(
    token_ids: list[int], ngrams: list[int], num_tokens: int, most: int
) -> None:
    drafts = NgramDrafter(num_tokens, *ngrams).propose(token_ids, most)
    start = search(token_ids, *ngrams)
    if start is None:
        assert drafts == []
        return
    assert len(drafts) == min(num_tokens, most)
    followed = token_ids + drafts
    assert drafts == followed[start : start + len(drafts)], "also where it overlaps the end"


def test_a_draft_of_repeated_text_wraps_around() -> None:
    assert NgramDrafter(5, 1, 3).propose([9, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1]
    assert NgramDrafter(5, 1, 3).propose([9, 4, 4], 7) == [4] * 5


@given(st.integers(1, 16), st.lists(st.floats(0, 1), max_size=60))
def test_credit_stays_within_its_bounds(most: int, shares: list[float]) -> None:
    credit = DraftBudget(most)
    for share in shares:
        granted = credit.grant()
        assert 0 <= granted <= most
        num_accepted = round(granted * share)
        if granted:
            credit.record_result(granted, num_accepted)
            if 3 * num_accepted >= granted:
                assert credit.grant() >= granted, "a third is enough to keep it"


@given(st.integers(1, 16))
def test_drafts_that_keep_failing_become_few_and_are_tried_again(most: int) -> None:
    credit, num_steps = DraftBudget(most), 400
    granted = []
    for _ in range(num_steps):
        granted.append(credit.grant())
        if granted[-1]:
            credit.record_result(granted[-1], 0)
    assert sum(granted) <= 2 * most + 1 + 2 * CREDIT_PER_STEP * num_steps
    assert sum(granted[-8:]) > 0
    for _ in range(8 + most.bit_length()):
        if held := credit.grant():
            credit.record_result(held, held)
    assert credit.grant() == most, "it grows as fast as it fell"
