"""What a renderer is asked and answers at once, without an engine.

GenerateRequest    → RenderedPrompt | Refusal      pm.render.<model>        envelope | JSON
FeaturesRequest    → RenderedFeatures | Refusal    pm.features.<model>      msgpack | JSON
TokenizeRequest    → Tokenized | Refusal           pm.tokenize.<model>      JSON
DetokenizeRequest  → Detokenized | Refusal         pm.detokenize.<model>    JSON
(empty)            → ModelCard | Refusal           pm.card.<model>          JSON

Every question may be JSON or msgpack. What clients of any language may want to read is JSON, and so
is a refusal.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.messages import ErrorInfo, GenerateRequest, Messages, Tools, is_packed
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.sampling import TokenId


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two: `messages` go through the model's chat template, `prompt` is taken as is.

    The fields mean what those of GenerateRequest mean.
    """

    messages: Messages | None = None
    prompt: str | None = None
    tools: Tools = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True


class Tokenized(Struct, frozen=True, tag="tokens"):
    """Pictures count with all the tokens that they fill."""

    count: int
    max_model_len: int
    """Prompt and answer together; a prompt with more tokens is not refused here."""
    token_ids: list[int]
    token_strs: list[str] = []
    """As the tokenizer spells them."""


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    skip_special_tokens: bool = False
    """In the text."""


class Detokenized(Struct, frozen=True, tag="text"):
    prompt: str
    """Text of all the tokens together, control tokens included unless they are to be skipped."""
    token_bytes: list[bytes]
    """Of each token alone; base64 in JSON."""


class ModelCard(Struct, frozen=True, tag="card"):
    """What can be asked of a model."""

    model: str
    max_model_len: int
    """In tokens, prompt and answer together."""
    vocab_size: int
    takes_pictures: bool
    takes_tools: bool
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """In which form it writes its calls, if that is known."""
    call_signs: list[int | None] | None = None
    """Of a model that writes calls as `hermes`, the tokens of `<tool_call>` and `</tool_call>`;
    null for one that is spelled in several."""


class FeaturesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to be rendered for another server, in the form of vLLM's render protocol."""

    request: GenerateRequest
    payload: Literal["tensors", "none"] = "tensors"
    """Whether the pictures' data are wanted, or their hashes and places alone."""


class RenderedFeature(Struct, frozen=True):
    modality: str
    mm_hash: str
    placeholder: PlaceholderRange
    kwargs_data: bytes | None = None
    """The item as msgpack, see `shared.codec.vllm_kwargs`."""
    mm_metadata: bytes | None = None
    """The same with nothing but what the language model needs to know of the picture."""


class RenderedFeatures(Struct, frozen=True):
    """In the order of the prompt."""

    prompt_token_ids: list[int]
    features: list[RenderedFeature]


class RenderedPrompt(Struct, frozen=True):
    """What an engine would be given: the items' tensors are in the envelope."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]


class ErrorReply(Struct, frozen=True, tag="error"):
    """An answer that is none."""

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
_refusal = msgspec.json.Decoder(ErrorReply)


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


def decode_refusal(data: bytes) -> ErrorReply | None:
    """None for an answer that is none: an envelope does not begin with a brace."""
    refusal: ErrorReply | None = _refusal.decode(data) if data[:1] == b"{" else None
    return refusal
