"""Positions in results: each text names exactly the lines that were read."""

import pytest

from shared.errors import InvalidRequest
from workers.gateway.core.result_positions import ResultPosition, after_line, parse_position


@pytest.mark.parametrize("position", [ResultPosition(), ResultPosition(8), ResultPosition(8, 3)])
def test_a_position_survives_its_text(position: ResultPosition) -> None:
    assert parse_position(str(position), "after") == position


def test_the_position_after_the_last_line_is_the_next_record() -> None:
    assert after_line(7, 3, 3) == ResultPosition(8)
    assert str(after_line(7, 3, 3)) == "7"
    assert str(after_line(7, 2, 3)) == "7-2"


@pytest.mark.parametrize("text", ["", "-1", "1-", "1-2-3", "x", "9" * 16, "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID must be"):
        parse_position(text, "Last-Event-ID")
