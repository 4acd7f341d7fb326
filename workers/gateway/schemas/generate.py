"""Request and response bodies of `/inference/v1/generate`. Pure.

Responses are equal to vLLM's, byte for byte: they have its fields in its order, nulls included.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from shared.protocol.encoding import JsonObject
from workers.gateway.schemas.openai_response import TokenLogprob

OutputMode = Literal["tokens", "text"]
MAX_ID_LEN = 256


class PlaceholderInfo(Struct, frozen=True):
    """Placeholder range: the position of an item's tokens in the prompt."""

    offset: int
    length: int


Placeholders = dict[str, list[PlaceholderInfo]]


class FeaturesInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multimodal items of a rendered prompt, by modality."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: Placeholders
    kwargs_data: dict[str, list[str | None]] | None = None
    """Base64 of msgpack, see `shared.codec.vllm_kwargs`. Null for an item sent by its hash."""
    mm_metadata: dict[str, list[str | None]] | None = None


class GenerateStreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Include usage in every chunk."""


class RenderedRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Response of the render endpoints, and request body of `/inference/v1/generate`."""

    request_id: Annotated[str, Meta(max_length=MAX_ID_LEN)] | None = None
    """Name of the request, repeated in its answer. The header `X-Request-Id` takes precedence."""
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None = None
    features: FeaturesInfo | None = None
    content_parts: list[JsonObject] | None = None
    sampling_params: JsonObject
    model: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: JsonObject | None = None
    return_token_ids: bool | None = None
    output_mode: OutputMode = "tokens"
    stream: bool | None = False
    stream_options: GenerateStreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None


class UsageInfo(Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: JsonObject | None = None
    completion_tokens_details: JsonObject | None = None


class TotalUsage(Struct, frozen=True, kw_only=True):
    """Usage at the end of a stream, without nulls."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class IdLogprob(Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float
    rank: int | None = None


class IdLogprobs(IdLogprob, frozen=True, kw_only=True):
    """Log probability of the chosen token.

    `top_logprobs` begins with the chosen token. The other tokens follow by rank.
    """

    top_logprobs: list[IdLogprob] = field(default_factory=list)


class TokensContent(Struct, frozen=True, kw_only=True):
    content: list[IdLogprobs] | None = None


class TextContent(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob] | None = None


class PromptLogprob(Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class WeightVersionSpan(Struct, frozen=True, kw_only=True):
    """Version of the weights that computed the tokens from `start` to before `end`.

    Pagemill has one version for all tokens.
    """

    version: str = "default"
    start: int = 0
    end: int


class GenerateChoice(Struct, frozen=True, kw_only=True):
    """A choice, or the part that one event of a stream adds to it.

    `text` is set in the output mode `text`.
    """

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    text: str | UnsetType = UNSET
    logprobs: TokensContent | TextContent | None = None


class GenerateResponse(Struct, frozen=True, kw_only=True):
    request_id: str
    model: str | None = None
    created: int | None = None
    usage: UsageInfo | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Placeholders | None = None
    metrics: JsonObject | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    output_mode: OutputMode = "tokens"
    choices: list[GenerateChoice] = field(default_factory=list)


class GenerateChunk(Struct, frozen=True, kw_only=True):
    """An event of a stream.

    The prompt's tokens are in the first event alone, and only with `return_token_ids`.
    """

    request_id: str
    usage: UsageInfo | TotalUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    mm_placeholders: Placeholders | UnsetType = UNSET
    output_mode: OutputMode = "tokens"
    choices: list[GenerateChoice] = field(default_factory=list)
