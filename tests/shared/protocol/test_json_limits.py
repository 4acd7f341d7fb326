from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import envelope
from shared.protocol.json_limits import MAX_DEPTH, MAX_SCHEMA_DEPTH, json_limit_error
from shared.protocol.sampling import SamplingParams, StructuredOutputs


def nested(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = {"a": value} if i % 2 else [value]
    return value


def test_depth_is_counted_to_the_level() -> None:
    assert json_limit_error(nested(MAX_DEPTH)) == ""
    assert "nesting" in json_limit_error(nested(MAX_DEPTH + 1))
    assert "nesting" in json_limit_error(nested(100_000))


def test_the_deepest_schema_fits_into_a_message_to_an_engine() -> None:
    schema = {"a": nested(MAX_SCHEMA_DEPTH - 1)}
    params = SamplingParams(structured_outputs=StructuredOutputs(json_schema=schema))
    encoded = envelope.encode(Holder(params), [])
    assert envelope.decode(encoded, Holder)[0].sampling_params == params


class Holder(msgspec.Struct):
    sampling_params: SamplingParams


@pytest.mark.parametrize("schema", [{"a": nested(600)}, {"const": 2**64}])
def test_a_schema_that_no_engine_could_decode_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="must have"):
        msgspec.convert({"json_schema": schema}, StructuredOutputs)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_an_accepted_value_can_be_encoded(value: Any) -> None:
    if json_limit_error(value) == "":
        msgspec.msgpack.encode(value)
