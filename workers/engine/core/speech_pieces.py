"""Pieces of long texts that are spoken one after another. Pure."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shared.protocol.records import AnyRecord, CodeChunk
from workers.engine.core.sequence import RequestOutput

# Ends of pieces, the best kind first: after sentences and lines, after clauses, between words. The
# characters by number are an ellipsis, closing quotation marks, and punctuation of full width.
_ENDS = (
    re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+|\n+"),
    re.compile(r"[,;:]\s+|[\uff0c\u3001\uff1b\uff1a]"),
    re.compile(r"\s+"),
)


class Piece(NamedTuple):
    """A piece of a text, and its place in the speech."""

    number: int = 0
    end: int = 0
    """Number of characters of the text up to the end of the piece."""
    is_last: bool = True
    first_frame: int = 0
    """Index of its first frame in the speech."""


def split_text(text: str, max_characters: int) -> list[str]:
    """Return pieces of at most `max_characters` characters, together the text.

    A piece is as long as possible and ends after a sentence, or else after a clause or a word.
    """
    pieces = []
    while len(text) > max_characters:
        end = _last_end(text[:max_characters])
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


def _last_end(text: str) -> int:
    for form in _ENDS:
        ends = [match.end() for match in form.finditer(text) if text[: match.start()].strip()]
        if ends:
            return ends[-1]
    return len(text)


def next_piece(
    text: str, max_characters: int | None, records: Sequence[AnyRecord]
) -> tuple[list[str], Piece]:
    """Return the pieces of a text, and the next one to speak by the records of its codes.

    Pieces that were spoken with another limit are kept. With None, the text is one piece.
    """
    chunks = [record for record in records if isinstance(record, CodeChunk)]
    ends = [chunk for chunk in chunks if chunk.end_character is not None]
    first_frame = ends[-1].position + len(ends[-1].frames) if ends else 0
    num_spoken = (ends[-1].end_character or 0) if ends else 0
    limit = len(text) if max_characters is None else max_characters
    pieces = split_text(text, limit)
    if num_spoken not in accumulate(map(len, pieces), initial=0):
        pieces = [text[:num_spoken], *split_text(text[num_spoken:], limit)]
    number = [*accumulate(map(len, pieces), initial=0)].index(num_spoken)
    end = num_spoken + len(pieces[number])
    return pieces, Piece(number, end, number == len(pieces) - 1, first_frame)


def frames_of_piece(records: Sequence[AnyRecord]) -> list[list[int]]:
    """Return the frames of the unfinished piece, by the records of a speech's codes."""
    frames: list[list[int]] = []
    for record in records:
        if isinstance(record, CodeChunk):
            frames = [] if record.end_character is not None else frames + record.frames
    return frames


def has_next_piece(last: RequestOutput, piece: Piece) -> bool:
    """Return whether another piece is spoken after the last output of this one.

    A speech that has reached its limit ends, because the piece is not whole.
    """
    if last.usage is None or piece.is_last:
        return False
    return all(choice.finish_reason == "stop" for choice in last.choices)
