"""Scores and rerankings: the plans of requests, and the assemblers of their answers. Pure.

A score is the cosine similarity of two embeddings. Each distinct text is a separate request on the
bus, like an input of `/v1/embeddings`, even if it is in several pairs.
"""

import base64
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from shared.errors import InvalidRequest, WorkerFailure
from shared.protocol.encoding import to_json
from shared.protocol.requests import EmbeddingParams
from workers.gateway.core.assembler import PROMPT_FIELDS, AnswerOptions
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.plan import SubmitPlan, generate_request
from workers.gateway.openai.embeddings import EmbeddingCollector, check_durable, embeddings_budget
from workers.gateway.schemas.embeddings import PooledRequest
from workers.gateway.schemas.scores import (
    RerankDocument,
    RerankList,
    RerankRequest,
    RerankResult,
    ScoreEntry,
    ScoreList,
    ScoreRequest,
)

PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Pairs of names for the two fields of a score."""

MAX_RETURNED_BYTES = 256 * 1024
"""Limit on the JSON of returned documents in the stored record of a durable request."""


class ScoreOptions(AnswerOptions, frozen=True, kw_only=True):
    top_n: int | UnsetType = UNSET
    documents: list[str] | UnsetType = UNSET
    parts: int = 1
    pairs: list[tuple[int, int]]
    """The parts of each pair."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    part_fields: list[str] = msgspec.field(default_factory=list)


def plan_score(request: ScoreRequest) -> SubmitPlan[ScoreOptions]:
    """Return the plan of a request. Raises InvalidRequest naming the field."""
    fields = _fields_of(request)
    first, second = (_texts_of(getattr(request, name)) for name in fields)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{fields[0]} has {len(first)} texts and {fields[1]} has {len(second)}: give one text"
            f" in {fields[0]}, or as many as in {fields[1]}",
            field=fields[0],
        )
    return _plan(request, fields, first, second)


def plan_rerank(request: RerankRequest) -> SubmitPlan[ScoreOptions]:
    """Return the plan of a request. Raises InvalidRequest naming the field."""
    documents = [text if isinstance(text, str) else text.text for text in request.documents]
    returned: list[str] | UnsetType = UNSET
    if request.return_documents is not False:
        if request.durable and (num_bytes := len(to_json(documents))) > MAX_RETURNED_BYTES:
            raise InvalidRequest(
                f"return_documents: the documents have {num_bytes} bytes as JSON, over the limit of"
                f" {MAX_RETURNED_BYTES} in the answer to a durable request: set it to false",
                field="return_documents",
            )
        returned = documents
    plan = _plan(request, ("query", "documents"), [request.query], documents)
    options = replace(plan.options, top_n=request.top_n or 0, documents=returned)
    return replace(plan, options=options)


def _fields_of(request: ScoreRequest) -> tuple[str, str]:
    all_names = dict.fromkeys(name for pair in PAIRS for name in pair)
    names = [name for name in all_names if getattr(request, name) is not None]
    for pair in PAIRS:
        if names == list(pair):
            return pair
    if len(names) > 1:
        raise InvalidRequest(
            f"give two fields, such as text_1 and text_2, not {', '.join(names)}", field=names[-1]
        )
    pair = next((pair for pair in PAIRS if set(names) & set(pair)), PAIRS[0])
    missing = next(name for name in pair if name not in names)
    raise InvalidRequest(f"{missing} is missing", field=missing)


def _texts_of(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _plan(
    request: PooledRequest,
    fields: tuple[str, str],
    first: Sequence[str],
    second: Sequence[str],
) -> SubmitPlan[ScoreOptions]:
    """Return the plan, with one part for each distinct text."""
    part_of: dict[str, int] = {}
    part_fields = []
    for field, texts in zip(fields, (first, second), strict=True):
        for text in texts:
            if text not in part_of:
                part_of[text] = len(part_of)
                part_fields.append(field)
    check_durable(request, len(part_of))
    params = EmbeddingParams(normalize=True)
    requests = [generate_request(request, embedding=params, prompt=text) for text in part_of]
    firsts = first if len(first) == len(second) else [*first] * len(second)
    options = ScoreOptions(
        parts=len(requests),
        pairs=[(part_of[a], part_of[b]) for a, b in zip(firsts, second, strict=True)],
        fields=dict.fromkeys(PROMPT_FIELDS, fields[1]),
        part_fields=part_fields,
    )
    return SubmitPlan(
        requests, {}, options, durable=bool(request.durable), unrecorded=frozenset({"documents"})
    )


class _PairAssembler(EmbeddingCollector[ScoreOptions]):
    """Base class of assemblers that compare embeddings."""

    def read(self, data: str) -> tuple[NDArray[np.float64], float]:
        """Return the embedding and its squared length."""
        vector = np.frombuffer(base64.b64decode(data), "<f4").astype(np.float64)
        return vector, _dot(vector, vector)

    def scores(self) -> list[float]:
        """Return the similarity of each pair.

        Raises WorkerFailure for embeddings that are missing, or that cannot be compared.
        """
        self.check_all()
        if len({len(vector) for vector, _ in self.embeddings.values()}) != 1:
            raise WorkerFailure("the embeddings of the inputs have different lengths")
        if not all(math.isfinite(square) for _, square in self.embeddings.values()):
            raise WorkerFailure("an embedding has values that are not finite")
        score_of = {
            (a, b): _cosine(self.embeddings[a], self.embeddings[b])
            for a, b in set(self.options.pairs)
        }
        return [score_of[pair] for pair in self.options.pairs]


class ScoreAssembler(_PairAssembler):
    """Assembler of scores."""

    def answer(self) -> ScoreList:
        """Raises WorkerFailure if a log has ended without an embedding."""
        entries = [ScoreEntry(index, score) for index, score in enumerate(self.scores())]
        request = self.request
        return ScoreList(request.request_id, request.created_s, request.model, entries, self.usage)


class RerankAssembler(_PairAssembler):
    """Assembler of documents in the order of their relevance."""

    def answer(self) -> RerankList:
        """Raises WorkerFailure if a log has ended without an embedding."""
        documents = self.options.documents
        results = [
            RerankResult(index, score)
            if not documents
            else RerankResult(index, score, RerankDocument(documents[index]))
            for index, score in enumerate(self.scores())
        ]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        top_results = results[: self.options.top_n or None]
        return RerankList(self.request.request_id, self.request.model, top_results, self.usage)


def _dot(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    # Not `@`, because a BLAS may use threads, and another order of additions on another machine.
    return float((first * second).sum())


def _cosine(
    first: tuple[NDArray[np.float64], float], second: tuple[NDArray[np.float64], float]
) -> float:
    """Return the cosine of two vectors, each with its squared length; 0 if a length is 0."""
    length = math.sqrt(first[1] * second[1])
    return max(-1.0, min(1.0, _dot(first[0], second[0]) / length)) if length else 0.0


SCORE = AnswerKind(
    name="score",
    id_prefix="score",
    options=ScoreOptions,
    assembler=ScoreAssembler,
    client_fields=ClientFields({**dict.fromkeys(PROMPT_FIELDS, "text_2"), "embedding": "model"}),
    budget=embeddings_budget("send fewer texts"),
)
RERANK = AnswerKind(
    name="rerank",
    id_prefix="rerank",
    options=ScoreOptions,
    assembler=RerankAssembler,
    client_fields=ClientFields({**dict.fromkeys(PROMPT_FIELDS, "documents"), "embedding": "model"}),
    budget=embeddings_budget("send fewer documents"),
)
