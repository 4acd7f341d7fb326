"""Requests that a renderer answers directly, without an engine, and their replies.

GenerateRequest    → RenderedPrompt | ErrorReply      pm.render.<model>        envelope | JSON
FeaturesRequest    → RenderedFeatures | ErrorReply    pm.features.<model>      msgpack | JSON
TokenizeRequest    → Tokenized | ErrorReply           pm.tokenize.<model>      JSON
DetokenizeRequest  → Detokenized | ErrorReply         pm.detokenize.<model>    JSON
(empty)            → ModelCard | ErrorReply           pm.card.<model>          JSON

Every request may be JSON or msgpack. The replies that clients in other languages are likely to read
are JSON, and so is every ErrorReply.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.encoding import is_packed
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.records import ErrorInfo
from shared.protocol.requests import GenerateRequest, Messages, Tools
from shared.protocol.sampling import TokenId


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Either `messages`, which go through the model's chat template, or `prompt`, taken as it is.

    The fields have the same meaning as those of GenerateRequest.
    """

    messages: Messages | None = None
    prompt: str | None = None
    tools: Tools = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True


class Tokenized(Struct, frozen=True, tag="tokens"):
    """Tokens of a prompt. An image counts with all the tokens of its placeholder range."""

    count: int
    max_model_len: int
    """Limit on prompt and answer together. A longer prompt is not refused here."""
    token_ids: list[int]
    token_strs: list[str] = []
    """The tokenizer's own strings for the tokens."""


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    skip_special_tokens: bool = False
    """Leave special tokens out of the text."""


class Detokenized(Struct, frozen=True, tag="text"):
    prompt: str
    """Text of all tokens together, including control tokens unless they are skipped."""
    token_bytes: list[bytes]
    """Bytes of each single token; base64 in JSON."""


class ModelCard(Struct, frozen=True, tag="card"):
    """Capabilities of a model."""

    model: str
    max_model_len: int
    """Limit on the tokens of prompt and answer together."""
    vocab_size: int
    takes_pictures: bool
    takes_tools: bool
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """Format in which the model writes tool calls, if it is known."""
    call_signs: list[int | None] | None = None
    """Token ids of `<tool_call>` and `</tool_call>` for the `hermes` format. A tag that consists of
    several tokens is null."""


class FeaturesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to render for another server, in the form of vLLM's render protocol."""

    request: GenerateRequest
    payload: Literal["tensors", "none"] = "tensors"
    """Parts of the features to return: with "none", only hashes and placeholder ranges."""


class RenderedFeature(Struct, frozen=True):
    modality: str
    mm_hash: str
    placeholder: PlaceholderRange
    kwargs_data: bytes | None = None
    """The item as msgpack, see `shared.codec.vllm_kwargs`."""
    mm_metadata: bytes | None = None
    """The same without the pixels: only what the language model needs to know about the image."""


class RenderedFeatures(Struct, frozen=True):
    """A rendered prompt, with its features in the order of the prompt."""

    prompt_token_ids: list[int]
    features: list[RenderedFeature]


class RenderedPrompt(Struct, frozen=True):
    """The input that an engine would get. The items' tensors are in the envelope."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]


class ErrorReply(Struct, frozen=True, tag="error"):
    """The reply to a request that failed."""

    error: ErrorInfo


# ---------------------------------------------------------------------------------------------
# bytes


_tokenize_from_json = msgspec.json.Decoder(TokenizeRequest)
_tokenize_from_msgpack = msgspec.msgpack.Decoder(TokenizeRequest)
_tokenized = msgspec.json.Decoder(Tokenized | ErrorReply)
_features_from_json = msgspec.json.Decoder(FeaturesRequest)
_features_from_msgpack = msgspec.msgpack.Decoder(FeaturesRequest)
_rendered_features = msgspec.msgpack.Decoder(RenderedFeatures)
_detokenize_from_json = msgspec.json.Decoder(DetokenizeRequest)
_detokenize_from_msgpack = msgspec.msgpack.Decoder(DetokenizeRequest)
_detokenized = msgspec.json.Decoder(Detokenized | ErrorReply)
_model_card = msgspec.json.Decoder(ModelCard | ErrorReply)
_error_reply = msgspec.json.Decoder(ErrorReply)


def decode_tokenize_request(data: bytes) -> TokenizeRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    decoder = _tokenize_from_msgpack if is_packed(data) else _tokenize_from_json
    request: TokenizeRequest = decoder.decode(data)
    return request


def decode_features_request(data: bytes) -> FeaturesRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    decoder = _features_from_msgpack if is_packed(data) else _features_from_json
    request: FeaturesRequest = decoder.decode(data)
    return request


def decode_detokenize_request(data: bytes) -> DetokenizeRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    decoder = _detokenize_from_msgpack if is_packed(data) else _detokenize_from_json
    request: DetokenizeRequest = decoder.decode(data)
    return request


def decode_rendered_features(data: bytes) -> RenderedFeatures:
    rendered: RenderedFeatures = _rendered_features.decode(data)
    return rendered


def decode_detokenized(data: bytes) -> Detokenized | ErrorReply:
    answer: Detokenized | ErrorReply = _detokenized.decode(data)
    return answer


def decode_model_card(data: bytes) -> ModelCard | ErrorReply:
    answer: ModelCard | ErrorReply = _model_card.decode(data)
    return answer


def decode_tokenized(data: bytes) -> Tokenized | ErrorReply:
    answer: Tokenized | ErrorReply = _tokenized.decode(data)
    return answer


def decode_error_reply(data: bytes) -> ErrorReply | None:
    """Return None for a reply that is an envelope or msgpack, which never begins with a brace."""
    reply: ErrorReply | None = _error_reply.decode(data) if data[:1] == b"{" else None
    return reply
