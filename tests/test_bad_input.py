"""Bad input through every way in: one sentence with the field, the allowed and the nearest.

The words of decoders, parsers and types of Python reach no client.
"""

import json
from collections.abc import Callable

import pytest

from shared.batches.input_file import InputLimits, find_fault
from shared.config.parsing import parse_config
from shared.errors import PagemillError
from shared.protocol.renderer_rpc import decode_tokenize_request
from tests.coordinator.test_admission import MODELS, PIPELINES
from workers.coordinator.admission import admit
from workers.gateway.http.body_types import converted, decoded
from workers.gateway.openai.responses import input_of
from workers.gateway.schemas import messages, openai_request, transcription
from workers.gateway.schemas.generate import RenderedRequest
from workers.gateway.vllm.errors import BODY
from workers.gateway.vllm.generate_request import parse

CHAT = "/v1/chat/completions"


def message_of(way: Callable[[str], object], text: str) -> str:
    with pytest.raises(PagemillError) as refused:
        way(text)
    return refused.value.message


def in_body(text: str) -> str:
    def way(text: str) -> object:
        return decoded(text.encode(), openai_request.ChatRequest, openai_request.UNSUPPORTED)

    return message_of(way, text)


def in_messages(text: str) -> str:
    def way(text: str) -> object:
        unsupported = messages.MESSAGES_UNSUPPORTED
        return decoded(text.encode(), messages.MessagesRequest, unsupported)

    return message_of(way, text)


def in_vllm(text: str) -> str:
    return message_of(lambda text: parse(decoded(text.encode(), RenderedRequest, root=BODY)), text)


def in_form(text: str) -> str:
    def way(text: str) -> object:
        form, unsupported = transcription.TranscriptionForm, transcription.UNSUPPORTED
        return converted(json.loads(text), form, unsupported, strict=False)

    return message_of(way, text)


def in_items(text: str) -> str:
    return message_of(lambda text: input_of(json.loads(text), "resp_1"), text)


def on_nats(text: str) -> str:
    def way(text: str) -> object:
        return admit("pm.request.demo.r1", "r1", text.encode(), MODELS, PIPELINES)

    return message_of(way, text)


def in_call(text: str) -> str:
    return message_of(lambda text: decode_tokenize_request.read(text.encode()), text)


def in_line(text: str) -> str:
    fault = find_fault(text.encode(), InputLimits(CHAT, frozenset({"m"}), 10, 1000))
    assert fault is not None
    return fault.message


def in_settings(text: str) -> str:
    return message_of(lambda text: parse_config(text, {}, "pagemill.yaml"), text)


def in_environment(text: str) -> str:
    variables: dict[str, str] = json.loads(text)
    return message_of(lambda _: parse_config("models: {a: {path: b}}", variables, "x.yaml"), text)


HI = '"messages": [{"role": "user", "content": "Hi"}]'
LINE = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}"'


@pytest.mark.parametrize(
    ("way", "text", "sentence"),
    [
        (in_body, '{"model": "m"', "the body is not valid JSON: it ends too early"),
        (in_body, '{"model" 1}', "the body is not valid JSON: byte 10 is wrong"),
        (in_body, "[]", "the request: must be an object, not a list"),
        (in_body, "{}", "model: the field is missing"),
        (
            in_body,
            f'{{"model": "m", {HI}, "max_token": 1}}',
            "max_token: unknown field; did you mean max_tokens?",
        ),
        (
            in_body,
            f'{{"model": "m", {HI}, "n": 1.5}}',
            "n: must be a whole number or null, not a decimal number",
        ),
        (
            in_body,
            f'{{"model": "m", {HI}, "seed": 1e400}}',
            "seed: must be a number that 64 bits can hold",
        ),
        (
            in_body,
            '{"messages": ' + "[" * 70 + "]" * 70 + "}",
            "messages: must have at most 64 levels of nesting",
        ),
        (
            in_body,
            f'{{"model": "m", {HI}, "structured_outputs": {{"regexp": "a"}}}}',
            "structured_outputs.regexp: unknown field; did you mean regex?",
        ),
        (
            in_messages,
            '{"model": "m", "max_tokens": 1, "messages": [{"role": "tool", "content": "Hi"}]}',
            "messages[0].role: 'tool' is not one of the possible values: assistant, system, user",
        ),
        (
            in_messages,
            f'{{"model": "m", "max_tokens": 1, {HI}, "stop_sequence": ["x"]}}',
            "stop_sequence: unknown field; did you mean stop_sequences?",
        ),
        (in_vllm, '{"token_ids"', "the body is not valid JSON: it ends too early"),
        (in_vllm, '{"token_ids": [1]}', "body.sampling_params: the field is missing"),
        (
            in_vllm,
            '{"token_ids": ["a"], "sampling_params": {}}',
            "body.token_ids[0]: must be a whole number, not a text",
        ),
        (
            in_vllm,
            '{"token_ids": [1], "sampling_param": {}}',
            "body.sampling_param: unknown field; did you mean sampling_params?",
        ),
        (
            in_vllm,
            '{"token_ids": [1], "sampling_params": {"temperature": -1}}',
            "temperature: must be at least 0",
        ),
        (
            in_vllm,
            '{"token_ids": [1], "sampling_params": {"structured_outputs": {"json": "{a"}}}',
            "structured_outputs.json is not JSON: byte 2 is wrong",
        ),
        (
            in_form,
            '{"model": "m", "temprature": "0"}',
            "temprature: unknown field; did you mean temperature?",
        ),
        (
            in_form,
            '{"model": "m", "temperature": "warm"}',
            "temperature: must be a number or null, not a text",
        ),
        (in_items, '[{"role": "user"}]', "input[0].content: the field is missing"),
        (
            in_items,
            '[{"type": null, "role": "user", "content": "Hi"}]',
            "input[0].type: must be a text, not null",
        ),
        (
            in_items,
            '[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]',
            "input[0].content[0].type: 'text' is not one of the possible values: input_text,"
            " input_image, input_audio, input_file, output_text, refusal",
        ),
        (
            on_nats,
            '{"model": "demo"',
            "the request is neither JSON nor msgpack: it ends too early",
        ),
        (
            on_nats,
            f'{{"model": "demo", {HI}, "sampling_params": {{"temperatur": 1}}}}',
            "sampling_params.temperatur: unknown field; did you mean temperature?",
        ),
        (
            on_nats,
            f'{{"model": "demo", {HI}, "lane": "slow"}}',
            "lane: 'slow' is not one of the possible values: batch, interactive",
        ),
        (in_call, '{"message": []}', "message: unknown field; did you mean messages?"),
        (in_line, LINE + "}", "body: the field is missing"),
        (
            in_line,
            LINE + ', "body": {"model": 3}}',
            "body.model: must be a text, not a whole number",
        ),
        (in_line, '{"custom_id": "a",}', "the line is not valid JSON: byte 19 is wrong"),
        (in_line, '{"customid": "a"}', "customid: unknown field; did you mean custom_id?"),
        (
            in_settings,
            "engine: {thread: 1}",
            "pagemill.yaml: engine.thread: unknown field; did you mean threads?",
        ),
        (
            in_settings,
            "models: {a: b: c}",
            "pagemill.yaml: it is not YAML from line 1, column 14 on",
        ),
        (
            in_settings,
            "engine: {threads: 2026-02-20}",
            "pagemill.yaml: engine.threads: must be a whole number, not a date",
        ),
        (
            in_settings,
            "engine: {threads: 2026-02-30}",
            "pagemill.yaml: it has a date or a number that does not exist",
        ),
        (
            in_environment,
            '{"PAGEMILL_ENGINE__THREAD": "1"}',
            "PAGEMILL_ENGINE__THREAD: engine.thread: unknown field; did you mean"
            " PAGEMILL_ENGINE__THREADS?",
        ),
        (
            in_environment,
            '{"PAGEMILL_ENGINE__THREADS": "x"}',
            "PAGEMILL_ENGINE__THREADS: engine.threads: must be a whole number, not a text",
        ),
    ],
)
def test_a_refusal_is_one_plain_sentence(
    way: Callable[[str], str], text: str, sentence: str
) -> None:
    assert way(text) == sentence
