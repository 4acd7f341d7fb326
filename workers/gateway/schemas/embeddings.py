"""Request and response bodies of OpenAI's embeddings, and fields shared with scores. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from workers.gateway.schemas.openai_request import Int64, Positive

MAX_INPUTS = 2048
"""Limit on the inputs of a request, as in OpenAI's API. The event loop compares a pair of
embeddings with 4096 values in 0.01 ms."""

EncodingFormat = Literal["float", "base64"]


class PooledRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that embeddings, scores and rerankings have in common."""

    model: str
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Int64 | None = None
    """Above 0: queued in the batch lane, after interactive requests."""
    adapter: str | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the embedding: by default `delivery.default_timeout_s`, at most
    `delivery.max_timeout_s`."""
    durable: bool | None = None
    """Continue the request when the connection closes; for at most 64 inputs."""

    user: str | None = None
    """No effect."""


class EmbeddingRequest(PooledRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: Any
    """Text, token ids, or a list of up to 2048 of either."""
    encoding_format: EncodingFormat | None = None
    """`base64`: 32-bit floats, least significant byte first. The default is `float`."""
    dimensions: Positive | None = None
    """Number of leading values that are kept and normalized; by default all."""


class EmbeddingEntry(Struct, frozen=True):
    index: int
    """Position of the input in the request, from 0."""
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
