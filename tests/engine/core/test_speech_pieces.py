"""Pieces of long texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.records import AnyRecord, CodeChunk
from workers.engine.core.speech_pieces import Piece, frames_of_piece, next_piece, split_text

TEXTS = st.text(st.sampled_from("ab .,!?\n\u3002\uff0c"), max_size=60)


@given(text=TEXTS, limit=st.integers(1, 20))
def test_pieces_are_the_text(text: str, limit: int) -> None:
    pieces = split_text(text, limit)
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)
    assert all(pieces) or not text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One. Two, three. Four", ["One. Two, three. ", "Four"]),
        ("One two, three four five", ["One two, ", "three four five"]),
        ("a long row of words only", ["a long row of ", "words only"]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijklmnopqr", "stuvwxyz"]),
        ('He said "no." She left', ['He said "no." ', "She left"]),
        ("Pi is 3.14159 and so on", ["Pi is 3.14159 and ", "so on"]),
        ("\u4f60" * 9 + "\u3002" + "\u597d" * 9, ["\u4f60" * 9 + "\u3002", "\u597d" * 9]),
    ],
)
def test_a_piece_ends_where_a_speaker_pauses(text: str, pieces: list[str]) -> None:
    assert split_text(text, 18) == pieces


@given(text=TEXTS.filter(bool), limit=st.integers(1, 20), other=st.integers(1, 20))
def test_each_piece_is_spoken_once_also_after_a_change_of_the_limit(
    text: str, limit: int, other: int
) -> None:
    records: list[AnyRecord] = []
    spoken: list[str] = []
    position = 0
    while True:
        pieces, piece = next_piece(text, limit if len(spoken) % 2 else other, records)
        assert "".join(pieces) == text
        assert piece.first_frame == position
        spoken.append(pieces[piece.number])
        if piece.is_last:
            break
        position += 3
        index = len(records)
        records += [
            CodeChunk(index, 1, position - 3, [[1], [2]]),
            CodeChunk(index + 1, 1, position - 1, [[3]], None, piece.end),
        ]
    assert "".join(spoken) == text


def test_a_text_without_a_limit_is_one_piece() -> None:
    text = "One. " * 500
    assert next_piece(text, None, []) == ([text], Piece(0, len(text), True, 0))


def test_the_frames_of_the_unfinished_piece() -> None:
    records: list[AnyRecord] = [
        CodeChunk(0, 1, 0, [[1], [2]]),
        CodeChunk(1, 1, 2, [], None, 5),
        CodeChunk(2, 1, 2, [[3]]),
        CodeChunk(3, 1, 3, [[4]]),
    ]
    assert frames_of_piece(records) == [[3], [4]]
    assert frames_of_piece(records[:2]) == []
