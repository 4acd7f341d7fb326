"""Requests that a renderer answers directly, without an engine, and their replies.

GenerateRequest    → RenderedPrompt | ErrorReply      pm.render.<model>        envelope | JSON
FeaturesRequest    → RenderedFeatures | ErrorReply    pm.features.<model>      msgpack | JSON
TokenizeRequest    → Tokenized | ErrorReply           pm.tokenize.<model>      JSON
DetokenizeRequest  → Detokenized | ErrorReply         pm.detokenize.<model>    JSON
SplitRequest       → SoundPieces | ErrorReply         pm.split.<model>         JSON
(empty)            → ModelCard | ErrorReply           pm.card.<model>          JSON

Every request may be JSON or msgpack. Replies that are useful for clients in other languages are
JSON, and so is every ErrorReply.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.helpers import patterns
from shared.protocol.encoding import ClientDecoder, Versioned
from shared.protocol.multimodal import Modality, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.records import ErrorInfo
from shared.protocol.requests import GenerateRequest, Messages, Tools
from shared.protocol.sampling import TokenId


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to tokenize `messages`, with the model's chat template, or `prompt`, unchanged.

    The fields have the same meaning as in GenerateRequest.
    """

    messages: Messages | None = None
    prompt: str | None = None
    tools: Tools = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    version: int = 1


class Tokenized(Struct, frozen=True, tag="tokens"):
    """Tokens of a prompt, including all tokens in the placeholder range of a medium."""

    count: int
    max_model_len: int
    """Limit on prompt and answer together. A longer prompt is not refused here."""
    token_ids: list[int]
    token_strs: list[str] = []
    """The tokenizer's own strings for the tokens."""
    version: int = 1


class DetokenizeRequest(Versioned, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    skip_special_tokens: bool = False
    """Omit special tokens from the text."""


class Detokenized(Versioned, frozen=True, tag="text"):
    prompt: str
    """Text of all tokens together, including control tokens unless they are skipped."""
    token_bytes: list[bytes]
    """Bytes of each single token; base64 in JSON."""


class ModelCard(Versioned, frozen=True, tag="card"):
    """Capabilities of a model."""

    model: str
    max_model_len: int
    """Limit on the tokens of prompt and answer together."""
    vocab_size: int
    takes_images: bool
    takes_tools: bool
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """Format in which the model writes tool calls, if it is known."""
    call_signs: list[int | None] | None = None
    """Token ids of `<tool_call>` and `</tool_call>` for the `hermes` format. A tag that consists of
    several tokens is null."""
    hidden_size: int = 0
    """Number of values of an embedding without `dimensions`."""
    media: list[Modality] | None = None
    """Kinds of media that the model reads; None for renderers without this field."""


class FeaturesRequest(Versioned, frozen=True, forbid_unknown_fields=True):
    """Request to render for another server, in the form of vLLM's render protocol."""

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
    """The same without the pixels: only the metadata that the language model needs."""


class RenderedFeatures(Versioned, frozen=True):
    """Rendered prompt, with its features in the order of the prompt."""

    prompt_token_ids: list[int]
    features: list[RenderedFeature]


class SplitRequest(Versioned, frozen=True, forbid_unknown_fields=True):
    """Request to cut a recording into pieces within the model's limit."""

    url: Annotated[str, Meta(pattern=patterns.MEDIA_URL)]


class SoundPieces(Versioned, frozen=True, tag="pieces"):
    """Pieces of a recording, in order. A short recording is one piece."""

    urls: list[str]
    """`media:` URLs, equal for equal recordings."""


class RenderedPrompt(Versioned, frozen=True):
    """Input that an engine would get. The tensors of the items are in the envelope."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]


class ErrorReply(Versioned, frozen=True, tag="error"):
    """Reply to a request that failed."""

    error: ErrorInfo


# ---------------------------------------------------------------------------------------------
# bytes


decode_tokenize_request = ClientDecoder(TokenizeRequest)
decode_features_request = ClientDecoder(FeaturesRequest)
decode_split_request = ClientDecoder(SplitRequest)
decode_detokenize_request = ClientDecoder(DetokenizeRequest)
decode_rendered_features = msgspec.msgpack.Decoder(RenderedFeatures).decode
decode_tokenized: Callable[[bytes], Tokenized | ErrorReply]
decode_tokenized = msgspec.json.Decoder(Tokenized | ErrorReply).decode
decode_detokenized: Callable[[bytes], Detokenized | ErrorReply]
decode_detokenized = msgspec.json.Decoder(Detokenized | ErrorReply).decode
decode_sound_pieces: Callable[[bytes], SoundPieces | ErrorReply]
decode_sound_pieces = msgspec.json.Decoder(SoundPieces | ErrorReply).decode
decode_model_card: Callable[[bytes], ModelCard | ErrorReply]
decode_model_card = msgspec.json.Decoder(ModelCard | ErrorReply).decode
_decode_error_reply = msgspec.json.Decoder(ErrorReply).decode


def decode_error_reply(data: bytes) -> ErrorReply | None:
    """Decode an ErrorReply; None for an envelope or msgpack, which never begin with a brace."""
    return _decode_error_reply(data) if data[:1] == b"{" else None
