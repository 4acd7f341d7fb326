"""Prompts in all their forms; tools, calls and results are a user's text like any other."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from shared.config.schema import ModelConfig
from shared.errors import ContextTooLong, InvalidRequest, UnsupportedContent
from shared.protocol.requests import (
    FunctionCall,
    FunctionDefinition,
    Message,
    Prompt,
    Tool,
    ToolCall,
)
from tests.renderer.processing.test_processor import SPECIALS, TEXT, TEXT_TEMPLATE, write_model
from workers.renderer.processing.processor import Processor

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|start|>system\\n' }}{% for t in tools %}{{ t | tojson }}"
    "{% if t.function.parameters.type != 'object' %}{{ raise_exception('no object') }}{% endif %}"
    "{% endfor %}{{ '<|end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' }}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
    "{% endfor %}{{ '<|end|>\\n' }}{% endfor %}"
    "{% if style == 'short' %}{{ 'Be short.' }}{% elif style %}{{ style }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}}
TOOL = Tool(FunctionDefinition("weather", "How it is", PARAMETERS))
CALL = ToolCall("call1", FunctionCall("weather", '{"city": "Köln"}'))
HISTORY = [
    Message("user", "How is it?"),
    Message("assistant", None, [CALL]),
    Message("tool", '{"degrees": 12}', tool_call_id="call1"),
]


def model(folder: Path, template: str = TOOL_TEMPLATE, **config: Any) -> Processor:
    return Processor(ModelConfig(str(write_model(folder, TEXT, template)), **config))


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("tools")
    return Processor(
        ModelConfig(
            str(write_model(folder, TEXT | {"max_position_embeddings": 2048}, TOOL_TEMPLATE))
        )
    )


def text_of(processor: Processor, prompt: Prompt) -> str:
    return processor.detokenize(processor.tokenize(prompt), skip_special_tokens=False)[0]


def test_tools_and_calls_are_what_transformers_makes_of_them(processor: Processor) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "How it is", "parameters": PARAMETERS},
    }
    call = {
        "id": "call1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Köln"}},
    }
    conversation = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"degrees": 12}', "tool_call_id": "call1"},
    ]
    expected = processor.tokenizer._tokenizer.apply_chat_template(
        conversation, tools=[tool], add_generation_prompt=True
    )["input_ids"]
    prompt = Prompt(HISTORY, tools=[TOOL])
    assert processor.tokenize(prompt) == expected
    text = text_of(processor, prompt)
    assert "<tool_call>weathercity=Köln;" in text
    assert '"description": "Where"' in text


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_a_call_without_arguments_has_an_object_of_none(
    processor: Processor, arguments: str
) -> None:
    call = ToolCall("c", FunctionCall("weather", arguments))
    text = text_of(processor, Prompt([Message("user", "a"), Message("assistant", None, [call])]))
    assert "<tool_call>weather<|end|>" in text


@pytest.mark.parametrize("arguments", ["[1]", "{", "12", '"x"', "[" * 5000])
def test_arguments_that_are_no_object_are_the_templates_to_refuse(
    processor: Processor, arguments: str
) -> None:
    call = ToolCall("c", FunctionCall("weather", arguments))
    with pytest.raises(InvalidRequest, match="refuses"):
        processor.tokenize(Prompt([Message("user", "a"), Message("assistant", None, [call])]))


def asking(text: str) -> dict[str, tuple[Prompt, str]]:
    """Wherever a client may write something, with the field that is to be named."""
    hello = [Message("user", "hello")]
    inner = {"type": "object", "properties": {"a": {"description": text}}}
    key = {"type": "object", "properties": {text: {}}}
    argument = ToolCall("c", FunctionCall("f", json.dumps({"a": [{"b": text}]})))
    name = ToolCall("c", FunctionCall(text, "{}"))
    return {
        "description": (
            Prompt(hello, tools=[Tool(FunctionDefinition("f", text, PARAMETERS))]),
            "tools[0].function",
        ),
        "schema": (
            Prompt(hello, tools=[TOOL, Tool(FunctionDefinition("f", None, inner))]),
            "tools[1].function",
        ),
        "key of a schema": (
            Prompt(hello, tools=[Tool(FunctionDefinition("f", None, key))]),
            "tools[0].function",
        ),
        "arguments": (
            Prompt([*hello, Message("assistant", "", [argument])]),
            "messages[1].tool_calls",
        ),
        "name of a call": (
            Prompt([*hello, Message("assistant", None, [name])]),
            "messages[1].tool_calls",
        ),
        "result": (
            Prompt([*HISTORY[:2], Message("tool", text, tool_call_id="call1")]),
            "messages[2].content",
        ),
        "variable": (Prompt(hello, template_kwargs={"style": text}), "template_kwargs.style"),
    }


@pytest.mark.parametrize("place", asking(""))
@pytest.mark.parametrize("token", [SPECIALS[0], SPECIALS[1]])
def test_control_tokens_are_refused_wherever_they_are(
    processor: Processor, place: str, token: str
) -> None:
    prompt, field = asking(f"see {token}.")[place]
    with pytest.raises(InvalidRequest, match="control token") as caught:
        processor.tokenize(prompt)
    assert caught.value.field == field
    harmless, _ = asking("see <|end|.")[place]
    assert "see <|end|." in text_of(processor, harmless)


def test_variables_reach_the_template_as_they_are(processor: Processor) -> None:
    hello = [Message("user", "hello")]
    assert "Be short." in text_of(processor, Prompt(hello, template_kwargs={"style": "short"}))
    bare = text_of(processor, Prompt(hello, template_kwargs={"add_generation_prompt": False}))
    assert bare.endswith("hello<|end|>\n")
    begun = [*hello, Message("assistant", "It is")]
    going_on = Prompt(begun, template_kwargs={"continue_final_message": True})
    assert text_of(processor, going_on).endswith("assistant\nIt is")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "truncation"])
def test_variables_do_not_change_what_is_done_with_the_template(
    processor: Processor, name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processor.tokenize(Prompt([Message("user", "a")], template_kwargs={name: "x"}))
    assert caught.value.field == f"template_kwargs.{name}"


def test_contradicting_variables_are_the_clients_fault(processor: Processor) -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match="refuses"):
        processor.tokenize(Prompt([Message("user", "a")], template_kwargs=both))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt([Message("user", "a")], tools=[TOOL]), "tools"),
        (Prompt(HISTORY[:2]), "messages[1].tool_calls"),
        (Prompt([HISTORY[0], HISTORY[2]]), "messages[1].role"),
    ],
)
def test_a_template_without_tools_takes_none(tmp_path: Path, prompt: Prompt, field: str) -> None:
    processor = model(tmp_path, TEXT_TEMPLATE)
    with pytest.raises(UnsupportedContent, match="tools") as caught:
        processor.tokenize(prompt)
    assert caught.value.field == field
    card = processor.card("m")
    assert (card.takes_tools, card.tool_parser) == (False, None)


def signed(sign: str) -> str:
    return TOOL_TEMPLATE.replace("<tool_call>", sign)


@pytest.mark.parametrize(
    ("template", "value", "parser"),
    [
        (TOOL_TEMPLATE, None, "hermes"),
        (signed("[TOOL_CALLS]"), None, "mistral"),
        (signed("<|python_tag|>"), None, "llama3_json"),
        (signed("Environment: ipython"), None, "llama3_json"),
        (signed("?"), None, None),
        (TOOL_TEMPLATE, "mistral", "mistral"),
    ],
)
def test_the_template_says_how_calls_are_written(
    tmp_path: Path, template: str, value: Any, parser: str | None
) -> None:
    card = model(tmp_path, template, tool_parser=value).card("m")
    assert (card.model, card.takes_tools, card.tool_parser) == ("m", True, parser)
    assert (card.max_model_len, card.takes_images) == (256, False)
    assert card.call_signs == ([None, None] if parser == "hermes" else None)


# ---------------------------------------------------------------------------------------------
# text and tokens


def with_start(folder: Path) -> Processor:
    """A processor with a tokenizer that adds a start token."""
    processor = model(folder)
    start, encoder = SPECIALS[1], processor.tokenizer._encoder
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{start} $A",
        special_tokens=[(start, encoder.token_to_id(start))],
    )
    return processor


def test_a_text_is_taken_as_it_is(tmp_path: Path) -> None:
    processor = with_start(tmp_path)
    text = "two <|end|> words"
    for value, expected in ((None, True), (True, True), (False, False)):
        written = text_of(processor, Prompt(text=text, add_special_tokens=value))
        assert written == ("<|start|>" if expected else "") + text
    hello = [Message("user", "a")]
    assert not text_of(processor, Prompt(hello)).startswith("<|start|><|start|>")
    added = text_of(processor, Prompt(hello, add_special_tokens=True))
    assert added.startswith("<|start|><|start|>")


def test_token_ids_are_taken_as_they_are(processor: Processor) -> None:
    token_ids = [5, processor.vocab_size - 1, 0]
    assert processor.tokenize(Prompt(token_ids=token_ids)) == token_ids
    with pytest.raises(InvalidRequest, match="out of the vocabulary") as caught:
        processor.tokenize(Prompt(token_ids=[0, processor.vocab_size]))
    assert caught.value.field == "prompt_token_ids[1]"
    with pytest.raises(ContextTooLong) as too_long:
        processor.check_features(Prompt(token_ids=[0] * processor.max_model_len))
    assert too_long.value.field == "prompt_token_ids"


def test_an_endless_text_is_refused_by_its_own_field(processor: Processor) -> None:
    with pytest.raises(ContextTooLong) as caught:
        processor.tokenize(Prompt(text="a" * 1_000_000))
    assert caught.value.field == "prompt"
    tool = Tool(FunctionDefinition("f", "a" * 1_000_000, PARAMETERS))
    numbers = {"numbers": [1] * 100_000}
    for more in ({"tools": [tool]}, {"template_kwargs": numbers}):
        with pytest.raises(ContextTooLong):
            processor.tokenize(Prompt([Message("user", "a")], **more))


def test_every_token_is_spelled_alone(processor: Processor) -> None:
    text = "Grüße, 世界 <|end|>"
    token_ids = processor.tokenize(Prompt(text=text))
    whole, each = processor.detokenize(token_ids, skip_special_tokens=False)
    assert whole == text
    assert b"".join(each) == text.encode()
    assert "Ġ" in processor.spellings(token_ids)
    with pytest.raises(InvalidRequest) as caught:
        processor.detokenize([processor.vocab_size], skip_special_tokens=False)
    assert caught.value.field == "tokens[0]"


def test_pieces_of_sentencepiece_are_spelled_alone() -> None:
    from tokenizers import Tokenizer, decoders, models

    from workers.renderer.processing.token_bytes import TokenByteDecoder

    pieces = {"<unk>": 0, "▁wo": 1, "rd": 2, "<0xE4>": 3, "é": 4}
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    spelling = TokenByteDecoder(tokenizer)
    assert [spelling.bytes_of(i) for i in range(6)] == [
        b"<unk>",
        b" wo",
        b"rd",
        b"\xe4",
        "é".encode(),
        b"",
    ]
