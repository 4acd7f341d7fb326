"""Strict functions with optional calls: the grammar accepts only calls that match the schemas."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from openai import AsyncOpenAI

from shared.errors import InvalidRequest
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import FunctionDefinition, Tool
from shared.protocol.sampling import StructuredOutputs
from shared.tool_calls.grammars import (
    arguments_schema,
    calls_schema,
    required_grammar,
    strict_grammar,
)
from shared.tool_calls.parser import ToolParser
from shared.tool_calls.scanner import Call
from tests.cluster.conftest import start_cluster, stop_cluster
from tests.gateway.conftest import Gateway, start_gateway
from tests.gateway.routes.test_chat import ROOT
from workers.engine.sampling.grammar import to_llguidance
from workers.engine.sampling.grammar_sandbox import compile_grammar
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.chat import plan_chat
from workers.gateway.schemas.openai_request import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    StructuredOutputsBody,
)

PAINT = {
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/colour"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
    "$defs": {"colour": {"enum": ["red", "blue"]}},
}
TOOLS = [
    ChatTool(FunctionDefinition("paint", parameters=PAINT, strict=True)),
    ChatTool(FunctionDefinition("now", strict=True)),
    ChatTool(FunctionDefinition("free", parameters=PAINT)),
]
VALID = {
    "paint": jsonschema_rs.validator_for(PAINT),
    "now": jsonschema_rs.validator_for({"type": "object"}),
    "free": jsonschema_rs.validator_for({"type": "object"}),
}
CARD = ModelCard("m", 1024, 768, False, True, "hermes", call_signs=[None, None])


@pytest.fixture(scope="module")
def matcher() -> LLMatcher:
    """A matcher with one token for each byte."""
    definition = to_llguidance(StructuredOutputs(grammar=strict_grammar(TOOLS, [None, None])))
    matcher = compile_grammar(LLTokenizer("byte"), definition)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


WHOLE = [
    'So.<tool_call>\n{"name": "paint", "arguments": {"colour": "red", "size": 3}}\n</tool_call>',
    '<tool_call>{"name":"now","arguments":{}}</tool_call>',
    '\n<tool_call>\n{"name": "free", "arguments": {"a": [1, "<tool_call>"]}}\n</tool_call>\n',
]
PIECES = st.sampled_from(
    [
        *WHOLE,
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "\n",
        " ",
        "<",
        "é",
        "x",
        '"',
        "{",
        "}",
        "[1]",
        '{"name": "',
        "paint",
        "free",
        "now",
        '", "arguments": {',
        '"colour": "',
        "red",
        "green",
        '"size": ',
        "12",
        ", ",
        "\\",
        "null",
    ]
)


def take(matcher: LLMatcher, piece: bytes) -> bytes:
    """Return the part of the piece that the grammar accepts."""
    return piece[: matcher.try_consume_tokens(list(piece))]


@given(st.lists(st.tuples(PIECES, st.integers(0, 255)), max_size=30))
def test_text_that_the_grammar_accepts_parses_as_calls_of_the_schemas(
    matcher: LLMatcher, steps: list[tuple[str, int]]
) -> None:
    matcher, data = matcher.deep_copy(), b""
    for piece, choice in steps:
        prefix = take(matcher, piece.encode())
        data += prefix
        if len(prefix) < len(piece.encode()):  # Continue with a byte that is allowed.
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            if allowed:
                data += take(matcher, bytes([allowed[choice % len(allowed)]]))
    assert not matcher.is_error()
    text = data.decode(errors="ignore")
    parser = ToolParser("hermes", [tool.function.name for tool in TOOLS])
    pieces = parser.feed(text)
    if not matcher.is_accepting():
        return
    pieces += parser.end()
    calls: list[list[str]] = []
    for event in pieces:
        if not isinstance(event, Call):
            assert "<tool_call>" not in event.text
        elif event.name is not None:
            calls.append([event.name, event.arguments])
        else:
            calls[event.index][1] += event.arguments
    for name, arguments in calls:
        assert VALID[name].is_valid(json.loads(arguments)), (name, arguments)
    inside = text.count('"<tool_call>"')
    assert len(calls) == text.count("<tool_call>") - inside or '"' in text


@pytest.mark.parametrize("text", ["", "Just <text>, {1}", "<tool_cal", *WHOLE, "".join(WHOLE)])
def test_the_grammar_accepts_valid_answers(matcher: LLMatcher, text: str) -> None:
    matcher = matcher.deep_copy()
    assert take(matcher, text.encode()) == text.encode()
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>x",
        '<tool_call>{"name": "nobody"',
        '<tool_call>{"name": "paint", "arguments": {"colour": "green"',
        '<tool_call>{"name": "paint", "arguments": {"colour": "red"}',
        '<tool_call>{"name": "now", "arguments": 1',
        f"{WHOLE[0]} <tool_call> ",
    ],
)
def test_the_grammar_rejects_invalid_calls(matcher: LLMatcher, text: str) -> None:
    assert len(take(matcher.deep_copy(), text.encode())) < len(text.encode())


@pytest.mark.parametrize(
    ("one_call", "text", "accepted"),
    [
        (True, WHOLE[1], True),
        (True, "", False),
        (True, f"So. {WHOLE[1]}", False),
        (True, WHOLE[1] * 2, False),
        (False, WHOLE[1] * 2, True),
        (False, f"{WHOLE[1]}\n{WHOLE[1]}", True),
        (False, '<tool_call>{"name": "free", "arguments": [1]}</tool_call>', False),
        (False, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', True),
    ],
)
def test_required_calls_are_all_of_an_answer(one_call: bool, text: str, accepted: bool) -> None:
    grammar = required_grammar(TOOLS, [None, None], one_call=one_call)
    definition = to_llguidance(StructuredOutputs(grammar=grammar))
    matcher = compile_grammar(LLTokenizer("byte"), definition)
    assert not matcher.is_error(), matcher.get_error()
    whole = take(matcher, text.encode()) == text.encode()
    assert (whole and matcher.is_accepting()) == accepted


# Schemas with references, as older and newer pydantic write them, and of a type that has itself.
COLOUR = {"type": "object", "properties": {"name": {"enum": ["red"]}}, "required": ["name"]}
REFERRING: dict[str, dict[str, Any]] = {
    "definitions": {
        "properties": {"a": {"$ref": "#/definitions/colour"}},
        "definitions": {"colour": COLOUR},
    },
    "allOf": {
        "properties": {"a": {"title": "A", "allOf": [{"$ref": "#/definitions/colour"}]}},
        "definitions": {"colour": COLOUR},
    },
    "$defs": {"properties": {"a": {"$ref": "#/$defs/colour"}}, "$defs": {"colour": COLOUR}},
    "another place": {
        "properties": {"a": {"$ref": "#/components/colour"}},
        "components": {"colour": COLOUR},
        "$id": "https://example.com/schema",
    },
    "the schema itself": {
        "properties": {"a": {"$ref": "#"}, "name": {"enum": ["red"]}, "list": {"items": {}}}
    },
}


@pytest.mark.parametrize("name", REFERRING)
def test_references_within_the_schema_of_a_strict_function_hold(name: str) -> None:
    other = FunctionDefinition("other", parameters={"$defs": {"colour": {"type": "null"}}})
    schema = {"type": "object", "required": ["a"]} | REFERRING[name]
    if name == "the schema itself":
        schema["required"] = []
    tools = [Tool(FunctionDefinition("f", parameters=schema, strict=True)), Tool(other)]
    ways = {
        "arguments": StructuredOutputs(grammar=strict_grammar(tools, [None, None])),
        "required": StructuredOutputs(grammar=required_grammar(tools, [None, None], one_call=True)),
        "parameters": StructuredOutputs(json_schema=calls_schema(tools, one_call=True)),
        "": StructuredOutputs(json_schema=arguments_schema(tools[0])),
    }
    for way, outputs in ways.items():
        matcher = compile_grammar(LLTokenizer("byte"), to_llguidance(outputs))
        assert not matcher.is_error(), (way, matcher.get_error())
        for inner, is_accepted in (
            ({"name": "red"}, True),
            ({"name": "blue"}, False),
            ({"name": "red", "more": 1}, False),
        ):
            key = {"required": "arguments"}.get(way, way)
            value: Any = {"name": "f", key: {"a": inner}} if way else {"a": inner}
            text = json.dumps([value] if way == "parameters" else value)
            if way in ("arguments", "required"):
                text = f"<tool_call>{text}</tool_call>"
            if way in ("parameters", ""):  # This form has no spaces.
                text = text.replace(" ", "")
            taken = take(matcher.deep_copy(), text.encode())
            assert (taken == text.encode()) is is_accepted, (way, text, taken)


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[ChatMessage("user", "x")], tools=TOOLS, **fields)


def test_calls_get_a_grammar_in_the_models_own_format() -> None:
    for choice in ("auto", "required"):
        plan = plan_chat(request(tool_choice=choice), CARD)
        assert "grammar" in plan.sampling["structured_outputs"]
        # The tags of a call may be special tokens.
        assert plan.sampling["skip_special_tokens"] is False
    untrained = msgspec.structs.replace(CARD, tool_parser=None, call_signs=None)
    with pytest.raises(UnsupportedParameter, match="was not trained to call tools"):
        plan_chat(request(), untrained)
    plan = plan_chat(request(tool_choice="required"), untrained)
    assert "json_schema" in plan.sampling["structured_outputs"]
    assert "structured_outputs" not in plan_chat(request(tool_choice="none"), CARD).sampling
    # Other servers read other grammars.
    assert "structured_outputs" not in plan_chat(request(), CARD, strict=False).sampling
    plan = plan_chat(request(tool_choice="required"), CARD, strict=False)
    assert "json_schema" in plan.sampling["structured_outputs"]
    free = ChatRequest(model="m", messages=[ChatMessage("user", "x")], tools=TOOLS[2:])
    assert "structured_outputs" not in plan_chat(free, CARD).sampling


def test_a_constraint_that_is_impossible_is_refused() -> None:
    for form in ("llama3_json", "mistral", "hermes"):
        with pytest.raises(UnsupportedParameter) as refused:
            plan_chat(request(), ModelCard("m", 1024, 768, False, True, form))
        assert refused.value.field == "tools[0].function.strict"
    with pytest.raises(InvalidRequest) as twice:
        plan_chat(request(structured_outputs=StructuredOutputsBody(regex="a")), CARD)
    assert twice.value.field == "structured_outputs.regex"


# -- a model with this format ---------------------------------------------------------------------

# Tokens of the demo model that it does not use.
TAGS = {759: "<tool_call>", 760: "</tool_call>"}


def write_model(folder: Path) -> Path:
    """Copy the demo model, with the tags of calls as tokens and a template that shows tools."""
    shutil.copytree(ROOT / "ops" / "demo_model", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] in TAGS:
            token |= {"content": TAGS[token["id"]], "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    tools_template = "{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call>\n{% endfor -%}"
    template.write_text(tools_template + template.read_text())
    return folder


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("calling")
    path = write_model(folder / "model")
    cluster = start_cluster(folder, f"models: {{demo: {{path: {path}, max_model_len: 1024}}}}\n")
    gateway = start_gateway(cluster, tmp_path_factory.mktemp("gateway"))
    yield gateway
    gateway.stop()
    stop_cluster(cluster)


def tools(*, strict: bool) -> Any:
    return [
        {"type": "function", "function": {"name": "paint", "parameters": PAINT, "strict": strict}}
    ]


async def test_arguments_of_a_strict_function_match_its_schema(calling: Gateway) -> None:
    common: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": 1,
        # The bias makes the model open a call.
        "logit_bias": {"759": 100},
        "parallel_tool_calls": False,
    }
    async with AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        free = await client.chat.completions.create(**common, tools=tools(strict=False))
        assert not free.choices[0].message.tool_calls  # The demo model was not trained for calls.
        strict = await client.chat.completions.create(**common, tools=tools(strict=True))
        (call,) = strict.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "paint"
        assert VALID["paint"].is_valid(json.loads(call.function.arguments))
        chunks = await client.chat.completions.create(
            **common, tools=tools(strict=True), stream=True
        )
        deltas = [c.choices[0].delta async for c in chunks]
        functions = [call.function for delta in deltas for call in delta.tool_calls or []]
        arguments = "".join((function and function.arguments) or "" for function in functions)
        assert arguments == call.function.arguments
        text = await client.chat.completions.create(
            **common | {"logit_bias": {"759": -100}, "temperature": 0}, tools=tools(strict=True)
        )
        plain = await client.chat.completions.create(
            **common | {"logit_bias": {"759": -100}, "temperature": 0}
        )
        assert text.choices[0].message.content
        assert not text.choices[0].message.tool_calls
        assert plain.choices[0].message.content
        bad: Any = tools(strict=True)
        bad[0]["function"]["parameters"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**common, tools=bad)
        assert (refused.value.code, refused.value.param) == ("invalid_grammar", "tools")
