"""Each sampling parameter has one declaration, which the bodies of all endpoints share."""

from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from shared.errors import RequestError
from shared.protocol.sampling import SamplingParams
from workers.gateway.core.plan import sampling_of
from workers.gateway.schemas.openai_request import ChatRequest, CommonRequest, CompletionRequest
from workers.gateway.schemas.sampling_fields import (
    NOT_OFFERED,
    OWN_FORM,
    SAME_FORM,
    optional_fields,
)
from workers.gateway.vllm.sampling import read_sampling, write_sampling

NAMES = SamplingParams.__struct_fields__
TYPES = get_type_hints(SamplingParams, include_extras=True)
BODIES: dict[Any, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
}
# A completion may consist of the echo of its prompt alone.
WIDER = {(CompletionRequest, "max_tokens")}


class MoreParams(SamplingParams, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """SamplingParams with one more parameter."""

    top_a: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


def range_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a value that is not null."""
    others = [other for other in schema.get("anyOf", [schema]) if other != {"type": "null"}]
    schema_range = others[0] if len(others) == 1 else {"anyOf": others}
    return {key: value for key, value in schema_range.items() if key != "default"}


def properties(body: Any) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([body])
    fields: dict[str, Any] = components[body.__name__]["properties"]
    return fields


def edges(name: str) -> tuple[list[Any], list[Any]]:
    """Values at the ends of a number's range, and next to it."""
    numbers: list[Any] = [
        kind
        for kind in getattr(msgspec.inspect.type_info(TYPES[name]), "types", None)
        or [msgspec.inspect.type_info(TYPES[name])]
        if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    ]
    (kind,) = numbers
    step = 1 if isinstance(kind, msgspec.inspect.IntType) else 0.001
    lowest = kind.gt + step if kind.ge is None else kind.ge
    return [lowest, kind.le], [lowest - step, kind.le + step]


NUMBERS = [
    name
    for name in NAMES
    if {"minimum", "exclusiveMinimum"} & range_of(msgspec.json.schema(TYPES[name])).keys()
]


def test_every_parameter_is_offered_or_is_a_known_exception() -> None:
    assert set(SAME_FORM) | OWN_FORM | NOT_OFFERED == set(NAMES)
    assert len(SAME_FORM) + len(OWN_FORM) + len(NOT_OFFERED) == len(NAMES)
    assert len(NUMBERS) > 10
    for body in BODIES:
        assert set(NAMES) - NOT_OFFERED <= set(properties(body))


@pytest.mark.parametrize("body", BODIES)
def test_the_openai_bodies_have_the_same_ranges(body: Any) -> None:
    ranges = properties(body)
    for name in SAME_FORM:
        if (body, name) not in WIDER:
            assert range_of(ranges[name]) == range_of(msgspec.json.schema(TYPES[name])), name


@pytest.mark.parametrize("name", SAME_FORM)
def test_a_value_given_to_openai_bodies_goes_into_the_plan(name: str) -> None:
    value = getattr(SamplingParams(), name)
    value = 1 if value is None and name in NUMBERS else [7] if value is None else value
    for body, required in BODIES.items():
        request: CommonRequest = msgspec.convert(required | {name: value}, body)
        assert sampling_of(request) == {name: value}


@pytest.mark.parametrize("name", NUMBERS)
def test_vllms_bodies_have_the_same_ranges(name: str) -> None:
    inside, outside = edges(name)
    # Several greedy choices are refused for another reason.
    for value in inside:
        fields = {name: value, "temperature": 1.0} if name == "n" else {name: value}
        assert read_sampling(fields)[name] == value
    for value in outside:
        if name in ("seed", "top_k") and value == -1:
            continue  # vLLM's way of leaving it out
        with pytest.raises(RequestError) as refused:
            read_sampling({name: value})
        assert refused.value.field == name


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_for_vllm_is_read_again(name: str) -> None:
    value = edges(name)[0][1] if name in NUMBERS else None
    params = msgspec.convert({} if value is None else {name: value}, SamplingParams)
    written = write_sampling(params, params.max_tokens or 5, stream=False)
    assert read_sampling(written)[name] == (
        params.max_tokens or 5 if name == "max_tokens" else getattr(params, name)
    )


def test_a_new_parameter_is_a_field_of_the_openai_bodies() -> None:
    (more,) = {field[0] for field in optional_fields(MoreParams)} - set(SAME_FORM)
    body: Any = msgspec.defstruct("Body", optional_fields(MoreParams), kw_only=True)
    assert more == "top_a"
    assert msgspec.convert({"top_a": 0.5}, body).top_a == 0.5
    assert msgspec.convert({}, body).top_a is None
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"top_a": 1.5}, body)
