"""Objects of schemas are closed, unless several schemas describe them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.errors import InvalidRequest
from shared.helpers.closed_schemas import closed
from shared.protocol.sampling import StructuredOutputs
from workers.engine.sampling.grammar import to_llguidance

A, B = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": A}}
CLOSED = OBJECT | {"additionalProperties": False}
BARE = {"type": "object"}
OTHER = {"properties": {"b": B}}
REFERENCE = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        (OBJECT, CLOSED),
        ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OBJECT, A]}, {"anyOf": [CLOSED, A]}),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": OBJECT}},
            {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}},
        ),
        ({"allOf": [OBJECT]}, {"allOf": [CLOSED]}),
        (
            {"items": {"$ref": "#/components/x"}, "components": {"x": OBJECT, "y": BARE}},
            {"items": {"$ref": "#/components/x"}, "components": {"x": CLOSED, "y": BARE}},
        ),
        (
            OBJECT | {"patternProperties": {"b": OBJECT}},
            CLOSED | {"patternProperties": {"b": CLOSED}},
        ),
    ],
)
def test_objects_are_closed(schema: Any, result: Any) -> None:
    assert closed(schema) == closed(schema, strict=True) == result


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OBJECT, OTHER]},
        OBJECT | {"anyOf": [OTHER]},
        OBJECT | {"required": ["b"]},
        OBJECT | {"minProperties": 2},
        {"allOf": [REFERENCE, OTHER], "$defs": {"x": OBJECT}},
        OBJECT | REFERENCE | {"$defs": {"x": OTHER}},
        {"allOf": [{"anyOf": [REFERENCE]}, OTHER], "$defs": {"x": OBJECT}},
        OTHER | {"anyOf": [REFERENCE], "$defs": {"x": OBJECT}},
        {"allOf": [REFERENCE, OTHER], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": OBJECT}},
        {"allOf": [{"$ref": "#/$defs/x/allOf/0"}, OTHER], "$defs": {"x": {"allOf": [OBJECT]}}},
        {"anyOf": [REFERENCE], "required": ["b"], "$defs": {"x": OBJECT}},
    ],
)
def test_an_object_of_several_schemas_stays_open_and_is_not_strict(schema: Any) -> None:
    assert closed(schema) == schema
    with pytest.raises(InvalidRequest, match=r"^text\.format.*: strict needs") as refused:
        closed(schema, "text.format", strict=True)
    assert refused.value.field == "text.format"


@pytest.mark.parametrize("reference", ["#/$defs/y", "#x", "https://example.com/x", 3])
def test_a_reference_to_no_part_of_the_schema_is_not_strict(reference: Any) -> None:
    schema = {"items": {"$ref": reference}, "$defs": {"x": OBJECT | {"$anchor": "x"}}}
    assert closed(schema)["items"] == schema["items"]
    with pytest.raises(InvalidRequest) as refused:
        closed(schema, "text.format", strict=True)
    message = f"text.format.items: $ref {reference!r} names no part of this schema"
    assert refused.value.message == message


def test_what_a_schema_says_of_further_properties_is_kept() -> None:
    for schema in (OBJECT | {"additionalProperties": True}, BARE | {"additionalProperties": B}):
        assert closed(schema, strict=True) == schema
    assert closed(BARE) == BARE
    assert closed(BARE, strict=True) == BARE | {"additionalProperties": False}


def test_the_engine_allows_no_further_keys() -> None:
    tokenizer = LLTokenizer("byte")
    for outputs, allowed in (
        (StructuredOutputs(json_schema=OBJECT), False),
        (StructuredOutputs(json_schema=OBJECT | {"additionalProperties": True}), True),
    ):
        matcher = LLMatcher(tokenizer, to_llguidance(outputs))
        text = json.dumps({"a": "x", "b": 1})
        tokens = tokenizer.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is allowed
