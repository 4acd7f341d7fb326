"""Tokens of language models that are codes of a codec."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shared.config.added_tokens import read_token_ids
from shared.protocol.code_tokens import ORPHEUS_TOKEN, CodeTokens, find_code_tokens, is_orpheus

IDS = {ORPHEUS_TOKEN.format(number): 500 + number for number in range(10 + 7 * 4096)}
IDS |= {"<|begin_of_text|>": 1, "<|eot_id|>": 2}


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 50), st.data())
def test_frames_and_tokens_are_inverse(
    num_places: int, num_codes: int, first: int, data: st.DataObject
) -> None:
    codes = CodeTokens(first, num_codes, num_places)
    frame = st.lists(st.integers(0, num_codes - 1), min_size=num_places, max_size=num_places)
    frames = data.draw(st.lists(frame, max_size=6))
    token_ids = codes.tokens_of(frames)
    assert codes.frames_of(token_ids) == frames
    assert set(token_ids) <= set(codes.token_ids)
    # A frame that is not whole does not count, and neither does an end.
    num_left = data.draw(st.integers(0, len(token_ids)))
    assert codes.frames_of(token_ids[:num_left]) == frames[: num_left // num_places]
    assert codes.frames_of([*token_ids, codes.token_ids.stop]) == frames


def test_each_place_has_its_own_tokens() -> None:
    codes = CodeTokens(100, 10, 3)
    assert [codes.at(place) for place in range(3)] == [
        range(100, 110),
        range(110, 120),
        range(120, 130),
    ]
    assert codes.frames_of([105, 110, 120, 110]) == [[5, 0, 0]]


def test_a_config_declares_codes() -> None:
    config = {"model_type": "qwen2", "code_offset": 4, "num_codes": 6}
    assert find_code_tokens(config, IDS.get, 10) == CodeTokens(4, 6)
    assert find_code_tokens(config, IDS.get, 9) is None
    assert find_code_tokens(config | {"num_codes": 0}, IDS.get, 10) is None
    assert find_code_tokens({}, lambda token: None, 100_000) is None


def test_orpheus_is_recognized_by_its_tokens() -> None:
    codes = find_code_tokens({}, IDS.get, 40_000)
    assert codes is not None
    assert (codes.token_ids.start, len(codes.token_ids)) == (510, 7 * 4096)
    assert (codes.opening, codes.closing) == ((503, 1), (2, 504, 505, 501))
    assert codes.end_token_ids == {502}
    others = {**IDS, ORPHEUS_TOKEN.format(10 + 7 * 4096 - 1): 9}
    assert not is_orpheus(others.get)
    assert not is_orpheus(lambda token: None)


def test_added_tokens_are_read_from_a_folder(tmp_path: Path) -> None:
    find = read_token_ids(tmp_path)
    assert find("a") is None
    tokens = [{"id": 7, "content": "<a>"}, {"id": 8, "content": "<b>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert [find("<a>"), find("<b>"), find("<c>")] == [7, 8, None]
    for broken in ("{<a>", '["<a>"]', '{"added_tokens": "<a>"}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        assert find("<a>") is None
