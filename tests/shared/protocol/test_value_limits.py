"""The walks before decoding agree with the decoders, and end at their limits."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import envelope
from shared.helpers.validation import complaint_of
from shared.protocol.encoding import UNDECODABLE, ClientDecoder, is_packed
from shared.protocol.prompts import prompt_of
from shared.protocol.requests import GenerateRequest
from shared.protocol.task_messages import RenderBody, Task, TaskHeader
from shared.protocol.value_limits import (
    MAX_DEPTH,
    MAX_NUMBERS,
    MAX_VALUES,
    check_json,
    check_msgpack,
    count_bytes,
    walk_json,
    walk_msgpack,
)
from tests.shared.protocol.test_json_limits import nested

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
PACKED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=300))
    | st.datetimes(timezones=st.timezones()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 2**63), inner),
)


def msgpack_error(data: bytes) -> str:
    try:
        msgspec.msgpack.decode(data)
    except (*UNDECODABLE, ValueError, TypeError) as error:
        return str(error)
    return ""


# -- msgpack --------------------------------------------------------------------------------------


@given(PACKED)
def test_values_written_by_msgspec_are_whole(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert walk_msgpack(data)
    assert not walk_msgpack(data + b"\xc0")
    assert not walk_msgpack(data[:-1])


@given(st.binary(max_size=40) | st.lists(st.sampled_from(range(256)), max_size=12).map(bytes))
def test_the_walk_is_as_strict_as_msgspec(data: bytes) -> None:
    error = msgpack_error(data)
    # Contents of strings, keys and extensions are the decoder's alone.
    contents = ("utf-8", "unhashable", "surrogate", "timestamp", "Timestamp", "map keys", "key")
    if walk_msgpack(data):
        assert not error or any(part in error for part in contents), error
    else:
        assert error


@pytest.mark.parametrize(
    "value",
    [[1] * 70_000, [1.5] * 1000, ["a" * 70_000], b"a" * 70_000, {str(i): i for i in range(9999)}]
    + [dict.fromkeys(range(20000), 1), [msgspec.msgpack.Ext(5, b"x" * n) for n in (1, 2, 4, 8, 16)]]
    + [[msgspec.msgpack.Ext(5, b"x" * n)] for n in (3, 300, 70_000)],
    ids=lambda value: str(value)[:20],
)
def test_every_width_of_length_is_read(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert walk_msgpack(data)
    assert not walk_msgpack(data[:-1])


# -- JSON -----------------------------------------------------------------------------------------


@given(ANY, st.sampled_from([None, 2]), st.booleans())
def test_valid_json_is_whole(value: Any, indent: int | None, ascii_only: bool) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    assert walk_json(data)


@given(ANY)
def test_values_of_json_are_counted_one_by_one(value: Any) -> None:
    data, num = json.dumps([value]).encode(errors="replace"), num_values([value])
    assert walk_json(data, num)
    with pytest.raises(msgspec.ValidationError, match=f"at most {num - 1} values"):
        walk_json(data, num - 1)
    # The quick count does not miss what the walk would refuse.
    with pytest.raises(msgspec.ValidationError):
        check_json(data, num - 1)


def num_values(value: Any) -> int:
    """Return the number of all values; the arrays here are shorter than a run."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_values, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(num_values, value))
    return 1


JSON_BYTES = st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"a"]))


@given(st.binary() | JSON_BYTES.map(b"".join))
def test_text_that_is_not_closed_is_refused_by_msgspec_too(data: bytes) -> None:
    if not walk_json(data):
        with pytest.raises(UNDECODABLE):
            msgspec.json.decode(data)


@pytest.mark.parametrize("times", [1, 2**10])
def test_bytes_are_counted_alike_in_bodies_of_any_size(times: int) -> None:
    data = b'{"a": [1, "\\""], "\xff": 2}' * times
    assert count_bytes(data, b'{",\\\xff') == [times, 7 * times, 2 * times, times, times]


def test_brackets_in_strings_do_not_count() -> None:
    check_json(json.dumps({"text": '[{,"\\' * 300_000}).encode())


# -- limits ---------------------------------------------------------------------------------------


FIELDS: list[tuple[Any, str]] = [
    ([[]] * (MAX_VALUES + 1), f"at most {MAX_VALUES} values"),
    (["x"] * (MAX_VALUES + 1), f"at most {MAX_VALUES} values"),
    ([7] * (MAX_NUMBERS + 300), f"at most {MAX_NUMBERS} values"),
    ({str(i): 1 for i in range(MAX_VALUES // 2)}, f"at most {MAX_VALUES} values"),
    ({"a": dict.fromkeys(range(MAX_VALUES // 2), 1.5)}, f"at most {MAX_VALUES} values"),
    ([[1, None, True]] * (MAX_VALUES // 4), f"at most {MAX_VALUES} values"),
    (nested(MAX_DEPTH), f"at most {MAX_DEPTH} levels"),
]


@pytest.mark.parametrize("write", [msgspec.msgpack.encode, msgspec.json.encode])
@pytest.mark.parametrize(("value", "complaint"), FIELDS, ids=[each[1] for each in FIELDS])
def test_an_excess_is_reported_with_its_field(value: Any, complaint: str, write: Any) -> None:
    data = write({"model": "x", "messages": [{"a": "b"}], "template_kwargs": value, "n": 1})
    with pytest.raises(msgspec.ValidationError, match=complaint) as caught:
        (check_msgpack if is_packed(data) else check_json)(data)
    assert complaint_of(caught.value).path == "template_kwargs"


@pytest.mark.parametrize("write", [msgspec.msgpack.encode, msgspec.json.encode])
def test_values_within_the_limits_pass(write: Any) -> None:
    values = {"deep": nested(MAX_DEPTH - 1), "lists": [[]] * (MAX_VALUES - 20)}
    for value in (*values.values(), [7] * (MAX_NUMBERS - 200)):
        data = write({"model": "x", "template_kwargs": value})
        (check_msgpack if is_packed(data) else check_json)(data)


@pytest.mark.parametrize("write", [msgspec.msgpack.encode, msgspec.json.encode])
@pytest.mark.parametrize(
    "value",
    [
        {str(i): 1 for i in range(MAX_VALUES // 2 - 20)},
        [[1, 2.5, None]] * (MAX_VALUES // 4 - 20),
        [[7] * 129] * (MAX_NUMBERS // 130),
        [[7] * 127] * (MAX_VALUES // 128),
    ],
    ids=["numbers by name", "short lists", "runs", "almost runs"],
)
def test_prompts_that_pass_can_become_tasks(value: Any, write: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    data = write({"model": "x", "template_kwargs": {"a": value}, "messages": messages})
    prompt = prompt_of(ClientDecoder(GenerateRequest)(data))
    message = envelope.encode(Task(TaskHeader("r", "m", "batch"), RenderBody(prompt)), [])
    assert envelope.decode(message, Task[RenderBody])[0].body.prompt == prompt


@given(
    st.binary()
    | st.tuples(st.sampled_from([b"{", b"\x81\xa1a", b"\x90"]), st.binary()).map(b"".join)
)
def test_malformed_bytes_raise_an_error_of_the_decoder_and_no_other(data: bytes) -> None:
    decode = ClientDecoder(GenerateRequest)
    with pytest.raises(UNDECODABLE):
        decode(data)
