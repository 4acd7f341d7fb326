"""Order of lines within the look-ahead: lines with an equal beginning follow each other."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batches.look_ahead import MAX_BYTES, MAX_LINES, LookAhead, beginning_of, in_order

KEYS = st.sampled_from([b"a", b"b", b"c"])


def beginning(**body: Any) -> tuple[bytes, ...]:
    return beginning_of(json.dumps({"model": "m"} | body).encode())


def chat(system: str, *parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": list(parts)}]
    return {"messages": messages}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_a_beginning_is_system_message_image_and_text() -> None:
    first = beginning(**chat("s", image("media:1"), text("x")), temperature=0)
    assert first == beginning(**chat("s", image("media:1"), text("x"), image("media:9")))
    others = [
        beginning(**chat("t", image("media:1"), text("x"))),
        beginning(**chat("s", image("media:2"), text("x"))),
        beginning(**chat("s", image("media:1"), text("y"))),
    ]
    differs = [[a != b for a, b in zip(first, other, strict=True)] for other in others]
    assert differs == [[True, False, False], [False, True, False], [False, False, True]]
    assert first[0] != beginning(**chat("s", image("media:1")), tools=[{"type": "function"}])[0]


def test_long_texts_with_the_same_beginning_are_equal() -> None:
    shots = "Question and answer. " * 100
    for field in ("prompt", "input"):
        assert beginning(**{field: shots + "1"}) == beginning(**{field: shots + "2"})
        assert beginning(**{field: "1" + shots}) != beginning(**{field: "2" + shots})
    one, two = (beginning(messages=[{"role": "user", "content": shots + n}]) for n in "12")
    assert one == two


def test_responses_have_instructions_and_items() -> None:
    def item(file: str) -> dict[str, Any]:
        parts = [{"type": "input_image", "file_id": file}, {"type": "input_text", "text": "x"}]
        return {"instructions": "i", "input": [{"role": "user", "content": parts}]}

    assert beginning(**item("file-1")) == beginning(**item("file-1"))
    assert beginning(**item("file-1"))[1] != beginning(**item("file-2"))[1]
    assert beginning(**item("file-1"))[0] != beginning(**item("file-1") | {"instructions": "j"})[0]


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"messages": 1}', b'{"messages": [{"content": null}]}']
)
def test_other_bodies_have_some_beginning(body: bytes) -> None:
    assert len(beginning_of(body)) == 3


@given(st.lists(st.tuples(KEYS, KEYS, KEYS), max_size=30))
def test_equal_beginnings_follow_each_other(keys: list[tuple[bytes, bytes, bytes]]) -> None:
    order = in_order(keys)
    assert sorted(order) == list(range(len(keys)))
    placed = [keys[position] for position in order]
    for depth in (1, 2, 3):
        prefixes = [key[:depth] for key in placed]
        runs = sum(a != b for a, b in pairwise(prefixes))
        assert runs == max(0, len(set(prefixes)) - 1)
    for key in set(keys):
        own = [position for position in order if keys[position] == key]
        assert own == sorted(own)


def test_lines_without_a_common_beginning_stay_in_order() -> None:
    keys = [(b"s", b"", b"%d" % number) for number in range(9)]
    assert in_order(keys) == list(range(9))


def test_the_look_ahead_is_limited_in_lines_and_bytes() -> None:
    lines: LookAhead[int] = LookAhead()
    while not lines.is_full:
        lines.add(0, b"{}")
    assert len(list(lines.take())) == MAX_LINES
    assert not lines.is_full
    lines.add(1, b" " * MAX_BYTES)
    assert lines.is_full
    assert list(lines.take()) == [1]
    assert list(lines.take()) == []
