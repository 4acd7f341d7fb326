"""Text read from parts of an answer does not depend on the parts."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.detokenizer import (
    EMPTY_WINDOW,
    MAX_CONTEXT_TOKENS,
    MAX_HELD_TOKENS,
    Decode,
    Detokenizer,
    read_text,
)

# A tokenizer with a token for every byte; 256 is a control token, which writes nothing.
CONTROL = 256
TOKENS = st.lists(st.integers(0, CONTROL), max_size=60)


def decode(token_ids: list[int]) -> str:
    return bytes(t for t in token_ids if t != CONTROL).decode(errors="replace")


def decode_with_fallback(token_ids: list[int]) -> str:
    """Decode as SentencePiece does: a run of byte tokens that is not valid UTF-8 becomes a
    replacement character for each of its bytes. Tokens from 1000 on are characters."""
    text = ""
    for is_byte, group in itertools.groupby(token_ids, lambda token_id: token_id < 256):
        run = list(group)
        try:
            text += bytes(run).decode() if is_byte else "".join(chr(t - 1000) for t in run)
        except UnicodeDecodeError:
            text += len(run) * "\N{REPLACEMENT CHARACTER}"
    return text


def read_in_parts(
    parts: list[list[int]], prompt: list[int], tokenizer: Decode = decode
) -> list[str]:
    _, window = read_text(tokenizer, EMPTY_WINDOW, prompt[-MAX_CONTEXT_TOKENS:])
    texts = []
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        text, window = read_text(tokenizer, window, part, is_last=is_last)
        texts.append(text)
        assert len(window.token_ids) < MAX_CONTEXT_TOKENS + MAX_HELD_TOKENS
    return texts


def read_parts(parts: list[list[int]], prompt: list[int]) -> str:
    return "".join(read_in_parts(parts, prompt))


@given(st.text(max_size=40), st.lists(st.integers(0, 160), max_size=20), TOKENS)
def test_text_in_parts_is_the_text_in_one(text: str, cuts: list[int], prompt: list[int]) -> None:
    answer = list(text.encode())
    for place in cuts[:5]:
        answer.insert(min(place, len(answer)), CONTROL)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parts = [answer[a:b] for a, b in itertools.pairwise(edges)]
    assert read_parts(parts, [*prompt, ord("\n")]) == text


@given(TOKENS, st.lists(st.integers(1, 30), max_size=6), st.booleans())
def test_tokens_read_at_once_have_the_text_of_tokens_in_turn(
    token_ids: list[int], sizes: list[int], has_fallback: bool
) -> None:
    """Whatever their bytes are: a record holds the tokens of one step or of many."""
    tokenizer = decode_with_fallback if has_fallback else decode
    if has_fallback:
        token_ids = [t if t < 128 else 1000 + t if t % 2 else t - 1 for t in token_ids]
    in_turn, at_once = Detokenizer(tokenizer, []), Detokenizer(tokenizer, [])
    texts = [in_turn.push(token_id)[0] for token_id in token_ids]
    start = 0
    for size in (*sizes, len(token_ids)):
        part = slice(start, start + size)
        assert at_once.read(token_ids[part]) == "".join(texts[part])
        start += size
    assert at_once.finish() == in_turn.finish()


@given(st.text(alphabet="aé€😀", max_size=12), st.integers(1, 7))
def test_byte_fallback_characters_come_whole(text: str, size: int) -> None:
    answer = [t for c in text for t in (c.encode() if c != "a" else [1000 + ord(c)])]
    parts = [answer[i : i + size] for i in range(0, len(answer), size)]
    assert "".join(read_in_parts(parts, [1000 + ord("x")], decode_with_fallback)) == text


def test_a_part_that_ends_inside_a_character_is_out_up_to_it() -> None:
    parts = [[*b"red ", 0xE2, 0x82], [0xAC]]
    assert read_in_parts(parts, list(b"\n")) == ["red ", "€"]


def test_invalid_bytes_are_not_held_forever() -> None:
    texts = read_in_parts([[0xE4]] * 40, [])
    assert "".join(texts) == 40 * "\N{REPLACEMENT CHARACTER}"
    assert len(texts[MAX_HELD_TOKENS - 1]) == MAX_HELD_TOKENS


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert read_parts([[ord("a"), 0xE4]], []) == "a\N{REPLACEMENT CHARACTER}"
