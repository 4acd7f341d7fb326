"""Requests and bodies that cost a decoder more than their bytes, with the answer to each.

A decoder holds the event loop of its process, so a limit is counted before anything is decoded. The
tests measure no time: they ask for the error, its field and its limit.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest, RequestError
from shared.helpers.validation import complaint_of
from shared.protocol.encoding import is_packed
from shared.protocol.msgpack_formats import RUN_LEN
from shared.protocol.renderer_rpc import (
    decode_detokenize_request,
    decode_features_request,
    decode_split_request,
    decode_tokenize_request,
)
from shared.protocol.requests import decode_request
from shared.protocol.sampling import MAX_GRAMMAR_BYTES
from shared.protocol.value_limits import (
    MAX_BARE_BYTES,
    MAX_DEPTH,
    MAX_ESCAPES,
    MAX_EXPONENTS,
    MAX_NUMBERS,
    MAX_VALUES,
    check_json,
)
from workers.agent import mcp_protocol
from workers.gateway.core.plan import _schema
from workers.gateway.http.body_types import decoded
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest
from workers.gateway.schemas.responses import ResponseRequest
from workers.gateway.vllm.sampling import _read_structure

VALUES = f"at most {MAX_VALUES} values"
NUMBERS = f"at most {MAX_NUMBERS} values"
DEPTH = f"at most {MAX_DEPTH} levels of nesting"
EXPONENTS = f"at most {MAX_EXPONENTS} exponents of three digits"
BARE = f"at most {MAX_BARE_BYTES} bytes outside of strings"
ESCAPES = f"at most {MAX_ESCAPES} escapes"


def array(value: bytes, count: int) -> bytes:
    return b"[" + b",".join([value] * count) + b"]"


Bomb = tuple[Callable[[], bytes], str]
"""JSON of a value, and the complaint about it."""
BOMBS: dict[str, Bomb] = {
    "empty arrays": (lambda: array(b"[]", MAX_VALUES + 1), VALUES),
    "empty objects": (lambda: array(b"{}", MAX_VALUES + 1), VALUES),
    "empty strings": (lambda: array(b'""', MAX_VALUES + 1), VALUES),
    "chains of arrays": (lambda: array(b"[" * 50 + b"]" * 50, MAX_VALUES // 50 + 1), VALUES),
    "short runs": (lambda: array(array(b"1", RUN_LEN - 2), MAX_VALUES // 100), VALUES),
    "objects of a field": (lambda: array(b'{"a":1}', MAX_VALUES // 2), VALUES),
    "one large object": (
        lambda: b"{" + b",".join(b'"%d":1' % i for i in range(MAX_VALUES)) + b"}",
        VALUES,
    ),
    "numbers": (lambda: array(b"7", MAX_NUMBERS + 2 * RUN_LEN), NUMBERS),
    "numbers in runs": (lambda: array(array(b"7", 2 * RUN_LEN + 1), MAX_NUMBERS // 200), NUMBERS),
    "nulls": (lambda: array(b"null", MAX_NUMBERS + 2 * RUN_LEN), NUMBERS),
    "deep arrays": (lambda: b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), DEPTH),
    "deep objects": (lambda: b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), DEPTH),
    "a million brackets": (lambda: b"[" * 10**6 + b"]" * 10**6, DEPTH),
}
TEXT_BOMBS: dict[str, Bomb] = {
    "1e308": (lambda: array(b"1e308", MAX_EXPONENTS + 1), EXPONENTS),
    "1E+308": (lambda: array(b"1E+308", MAX_EXPONENTS + 1), EXPONENTS),
    "small numbers": (lambda: array(b"-1.2345678901234567e-300", MAX_EXPONENTS + 1), EXPONENTS),
    "exponents with zeros": (lambda: array(b"1e00000000308", MAX_EXPONENTS + 1), EXPONENTS),
    "fields with exponents": (lambda: array(b'{"a":1e308}', MAX_EXPONENTS + 1), EXPONENTS),
    "long numbers with exponents": (
        lambda: array(b"1." + b"7" * 50 + b"e-300", MAX_EXPONENTS + 1),
        EXPONENTS,
    ),
    "long numbers": (lambda: array(b"0." + b"0" * 300 + b"7", MAX_BARE_BYTES // 300), BARE),
    "spaces": (lambda: b"[" + b" " * MAX_BARE_BYTES + b"]", BARE),
    "escapes": (lambda: b'"' + b"\\n" * (2 * MAX_ESCAPES + 2) + b'"', ESCAPES),
}
ALL = BOMBS | TEXT_BOMBS


def request_with(field: str, value: bytes) -> bytes:
    text = b'{"model":"m","messages":[{"role":"user","content":"x"}],"' + field.encode() + b'":'
    return text + b'{"x":' + value + b"}}"


def packed(text: bytes) -> bytes:
    value: Any = json.loads(text)
    return msgspec.msgpack.encode(value)


DECODERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "coordinator": (decode_request, "template_kwargs"),
    "coordinator, sampling": (decode_request, "sampling_params"),
    "renderer, tokens": (decode_tokenize_request, "template_kwargs"),
    "renderer, features": (decode_features_request, "request"),
    "renderer, pieces": (decode_split_request, "url"),
    "renderer, text": (decode_detokenize_request, "tokens"),
}


def refused_field(decode: Callable[[bytes], Any], data: bytes, complaint: str) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(data)
    refused = complaint_of(caught.value)
    assert complaint in refused.reason
    return refused.path


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_request_is_refused_before_it_is_decoded(decoder: str, name: str) -> None:
    decode, field = DECODERS[decoder]
    make, complaint = BOMBS[name]
    assert refused_field(decode, request_with(field, make()), complaint) == field


@pytest.mark.parametrize("name", [name for name in BOMBS if name != "a million brackets"])
def test_a_request_in_msgpack_is_refused_alike(name: str) -> None:
    make, complaint = BOMBS[name]
    data = packed(request_with("template_kwargs", make()))
    assert is_packed(data)
    assert refused_field(decode_request, data, complaint) == "template_kwargs"


@pytest.mark.parametrize("name", TEXT_BOMBS)
def test_numbers_and_strings_that_are_slow_to_read_are_refused(name: str) -> None:
    make, complaint = TEXT_BOMBS[name]
    field = refused_field(decode_request, request_with("template_kwargs", make()), complaint)
    # Escapes are counted at one go, for the whole of the text.
    assert field == ("" if name == "escapes" else "template_kwargs")


BODIES: dict[str, type] = {
    "chat_template_kwargs": ChatRequest,
    "metadata": ResponseRequest,
    "prompt": CompletionRequest,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("field", BODIES)
def test_a_body_is_refused_before_it_is_decoded(field: str, name: str) -> None:
    make, complaint = ALL[name]

    def decode(data: bytes) -> Any:
        check_json(data)
        return msgspec.json.decode(data, type=BODIES[field])

    assert refused_field(decode, request_with(field, make()), complaint) in (field, "")


@pytest.mark.parametrize("name", ALL)
def test_a_body_of_vllm_is_refused_before_it_is_decoded(name: str) -> None:
    make, complaint = ALL[name]
    with pytest.raises(RequestError, match=complaint) as caught:
        decoded(request_with("sampling_params", make()), dict, root="body")
    assert caught.value.field in ("body.sampling_params", "body")


@pytest.mark.parametrize("name", ALL)
def test_a_listing_of_a_tool_server_is_refused_before_it_is_decoded(name: str) -> None:
    data = b'{"jsonrpc":"2.0","id":1,"result":' + ALL[name][0]() + b"}"
    with pytest.raises(mcp_protocol.McpFault, match="too large or too deep"):
        mcp_protocol.decode_json(data)


# -- what is accepted -----------------------------------------------------------------------------

ACCEPTED: dict[str, Callable[[], bytes]] = {
    "token ids": lambda: array(b"151643", MAX_NUMBERS - 2 * RUN_LEN),
    "a long text": lambda: json.dumps("a text with 1e308 in it, [{" * 100_000).encode(),
    "an image": lambda: b'"data:image/png;base64,' + b"A1e308/+" * 2**20 + b'"',
    "a large image": lambda: b'"data:image/png;base64,' + b"A1e308/+" * (5 * 2**19) + b'"',
    "log probabilities": lambda: array(b"-1.1920928244535389e-07", MAX_NUMBERS // 2),
    "a text in escapes": lambda: json.dumps("é" * 10**6).encode(),
    "some large numbers": lambda: array(b"1e308", MAX_EXPONENTS - 1),
    "indented lists": lambda: json.dumps([[1, 2]] * 10_000, indent=4).encode(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_clients_send_is_accepted(name: str) -> None:
    assert decode_request(request_with("template_kwargs", ACCEPTED[name]())).template_kwargs


# -- schemas, which the client may write as a string ----------------------------------------------


def nested_schema(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


SCHEMAS: dict[str, Callable[[], str]] = {
    "arrays": lambda: '{"a":[' + "[]," * MAX_VALUES + "1]}",
    "numbers": lambda: '{"a":[' + "1e308," * MAX_VALUES + "1]}",
    "depth": lambda: nested_schema(MAX_GRAMMAR_BYTES),
    "a text": lambda: json.dumps({"a": "x" * MAX_GRAMMAR_BYTES}),
    "spaces": lambda: "{" + " " * MAX_GRAMMAR_BYTES + "}",
}
READERS: dict[str, Callable[[str], Any]] = {
    "OpenAI's": functools.partial(_schema, field="structured_outputs.json"),
    "vLLM's": lambda text: _read_structure({"json": text}),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("reader", READERS)
def test_a_schema_in_a_string_is_refused_by_its_length(reader: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the limit is {MAX_GRAMMAR_BYTES}") as caught:
        READERS[reader](SCHEMAS[name]())
    assert (caught.value.field or "").startswith("structured_outputs")


@pytest.mark.parametrize("value", [b"1", b"null", b"true", b"1.5"])
def test_a_schema_of_numbers_is_refused_by_their_number(value: bytes) -> None:
    """Without a walk over all of them, and before they are encoded."""
    schema = b'{"structured_outputs":{"json_schema":{"a":' + array(value, MAX_NUMBERS // 2) + b"}}}"
    data = b'{"model":"m","prompt":"x","sampling_params":' + schema + b"}"
    complaint = f"at most {MAX_GRAMMAR_BYTES // 2} values in a level"
    field = refused_field(decode_request, data, complaint)
    assert field == "sampling_params.structured_outputs"
