"""The id of the answer to a request, for valid and invalid messages."""

import msgspec
import pytest

from shared.protocol.request_ids import request_id_of


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ("r1", b"garbage", "r1"),
        (None, b'{"request_id": "r2", "x": 1}', "r2"),
        (None, msgspec.msgpack.encode({"request_id": "r3"}), "r3"),
        ("a.b", b"{}", None),
        ("*", b"{}", None),
        ("", b"{}", None),
        ("x" * 129, b"{}", None),
        ("item_" + "0" * 64, b"{}", None),
        (None, b'{"request_id": "item_1"}', None),
        (None, b'{"request_id": "a b"}', None),
        (None, b"garbage", None),
        (None, b"{}", None),
    ],
)
def test_the_id_to_answer_under(header: str | None, data: bytes, expected: str | None) -> None:
    assert request_id_of(header, data, "pm.request.m") == expected
