from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.detokenizer import Detokenizer

SPECIAL = 256


def decode(token_ids: list[int]) -> str:
    """One token for each byte; `SPECIAL` writes nothing."""
    return bytes(t for t in token_ids if t != SPECIAL).decode("utf-8", "replace")


def decode_words(token_ids: list[int]) -> str:
    """As SentencePiece does: a space before each word but the first of a text."""
    return " ".join(f"w{t}" for t in token_ids)


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    _, start, matched = min(ends)
    return text[:start], matched


def run(token_ids: list[int], stop: list[str]) -> tuple[str, str | None]:
    detokenizer, pieces = Detokenizer(decode, stop), []
    for token_id in token_ids:
        text, matched = detokenizer.push(token_id)
        pieces.append(text)
        if matched is not None:
            assert detokenizer.finish() == ""
            return "".join(pieces), matched
    return "".join([*pieces, detokenizer.finish()]), None


texts = st.text(alphabet="abé€😀", max_size=30)
stops = st.lists(st.text(alphabet="abé€😀", min_size=1, max_size=4), max_size=4)


@given(texts, stops)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    assert run(list(text.encode()), stop) == cut(text, stop)


@given(st.lists(st.sampled_from([97, 98, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, SPECIAL]), max_size=15))
def test_broken_bytes_are_decoded_as_the_whole_is(token_ids: list[int]) -> None:
    assert run(token_ids, [])[0] == decode(token_ids)


@given(texts, stops)
def test_nothing_is_given_out_that_is_taken_back(text: str, stop: list[str]) -> None:
    detokenizer, given_out = Detokenizer(decode, stop), ""
    for token_id in text.encode():
        piece, matched = detokenizer.push(token_id)
        given_out += piece
        assert cut(text, stop)[0].startswith(given_out)
        if matched is not None:
            return


def test_spaces_between_words_are_kept() -> None:
    detokenizer = Detokenizer(decode_words, [])
    assert [detokenizer.push(t)[0] for t in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_a_long_answer_decodes_a_few_tokens_at_a_time() -> None:
    longest = 0

    def watched(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(watched, [])
    for token_id in [*b"ab" * 100, *[0xE2] * 100, *[SPECIAL] * 100]:
        detokenizer.push(token_id)
    assert longest <= 33
