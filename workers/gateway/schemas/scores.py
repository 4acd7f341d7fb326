"""Request and response bodies of vLLM's score, and of rerank as in vLLM, Jina and Cohere. Pure."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from workers.gateway.schemas.embeddings import MAX_INPUTS, EmbeddingUsage, PooledRequest
from workers.gateway.schemas.openai_request import Count

UNSUPPORTED = frozenset(
    {
        "truncate_prompt_tokens", "truncation_side", "mm_processor_kwargs", "chat_template",
        "chat_template_kwargs", "instruction", "max_tokens_per_doc", "max_chunks_per_doc",
        "overlap_tokens", "rank_fields",
    }
)  # fmt: skip
"""Fields of these protocols that are not implemented."""

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(PooledRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request with two lists of texts: `text_1` and `text_2`, or other names for these fields."""

    text_1: Texts | None = None
    """One text to compare with each of `text_2`, or as many texts as `text_2`."""
    text_2: Texts | None = None
    queries: Texts | None = None
    """Another name of `text_1`, with `documents` or `items`."""
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    """Another name of `text_1`, with `data_2`."""
    data_2: Texts | None = None
    use_activation: bool | None = None
    """No effect: scores are similarities, without an activation function."""


class ScoreEntry(Struct, frozen=True):
    index: int
    """Number of the pair, from 0."""
    score: float
    """Cosine similarity of the two embeddings, from -1 to 1."""
    object: str = "score"


class ScoreList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    usage: EmbeddingUsage
    """A text that occurs several times is embedded and counted once."""
    object: str = "list"


class RerankDocument(Struct, frozen=True, forbid_unknown_fields=True):
    text: str


Documents = Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(PooledRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    query: str
    documents: Documents
    top_n: Count | None = None
    """Number of the best results to return; by default, and with 0, all."""
    return_documents: bool | None = None
    """Whether results have their documents. The default is true."""
    use_activation: bool | None = None
    """No effect: scores are similarities, without an activation function."""


class RerankResult(Struct, frozen=True):
    index: int
    """Position of the document in the request, from 0."""
    relevance_score: float
    """Cosine similarity with the query, from -1 to 1."""
    document: RerankDocument | UnsetType = UNSET


class RerankList(Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]
    """The most relevant document is the first."""
    usage: EmbeddingUsage
