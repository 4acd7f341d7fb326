import itertools

from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.core.detokenize_window import (
    NUM_CONTEXT_TOKENS,
    advance_window,
    context_of,
    open_window,
)

# A tokenizer with a token for every byte; 256 is a control token, which writes nothing.
CONTROL = 256
TOKENS = st.lists(st.integers(0, CONTROL), max_size=60)


def decode(token_ids: list[int]) -> str:
    return bytes(t for t in token_ids if t != CONTROL).decode(errors="replace")


def told(parts: list[list[int]], prompt: list[int]) -> str:
    seed, texts = context_of(prompt), []
    window = open_window(seed, decode(seed))
    for i, part in enumerate(parts):
        whole = window.token_ids + part
        last = i == len(parts) - 1
        text, window = advance_window(window, part, decode(whole), decode(context_of(whole)), last)
        texts.append(text)
        assert len(window.token_ids) <= NUM_CONTEXT_TOKENS
    return "".join(texts)


@given(st.text(max_size=40), st.lists(st.integers(0, 160), max_size=20), TOKENS)
def test_text_in_parts_is_the_text_in_one(text: str, cuts: list[int], prompt: list[int]) -> None:
    answer = list(text.encode())
    for place in cuts[:5]:
        answer.insert(min(place, len(answer)), CONTROL)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parts = [answer[a:b] for a, b in itertools.pairwise(edges)]
    assert told(parts, [*prompt, ord("\n")]) == text


def test_junk_does_not_wait_for_ever() -> None:
    text = told([[0xE4]] * 40, [])
    assert text == 40 * "\N{REPLACEMENT CHARACTER}"


def test_what_never_ended_is_told_at_the_end() -> None:
    assert told([[ord("a"), 0xE4]], []) == "a\N{REPLACEMENT CHARACTER}"
