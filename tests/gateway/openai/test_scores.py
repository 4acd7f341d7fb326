"""Plans of scores and rerankings, and the answers that are made of embeddings."""

import base64
import math
import struct
from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest, WorkerFailure
from shared.protocol.records import ErrorInfo, Finish, TokenChunk, Usage
from shared.protocol.requests import EmbeddingParams
from workers.gateway.core.assembler import Answering
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.openai.scores import (
    MAX_RETURNED_BYTES,
    RERANK,
    SCORE,
    ScoreOptions,
    plan_rerank,
    plan_score,
)
from workers.gateway.schemas.scores import RerankRequest, ScoreRequest

VECTORS = {"x": [1.0, 0.0], "y": [0.0, 2.0], "xy": [3.0, 3.0], "-x": [-4.0, 0.0], "0": [0.0, 0.0]}


def score_plan(**fields: Any) -> SubmitPlan[ScoreOptions]:
    return plan_score(msgspec.convert({"model": "demo", **fields}, ScoreRequest))


def rerank_plan(**fields: Any) -> SubmitPlan[ScoreOptions]:
    body = {"model": "demo", "query": "x", "documents": ["x"], **fields}
    return plan_rerank(msgspec.convert(body, RerankRequest))


def assembler_of(plan: SubmitPlan[ScoreOptions], kind: AnswerKind[ScoreOptions]) -> Any:
    """Return an assembler of the record as another gateway reads it, with all embeddings."""
    stored = msgspec.json.decode(msgspec.json.encode(plan.options), type=ScoreOptions)
    assembler = kind.assembler(Answering("the-id", "demo", 123, stored))
    for part, request in enumerate(plan.requests):
        assert request.prompt is not None
        data = base64.b64encode(struct.pack("<2f", *VECTORS[request.prompt])).decode()
        assembler.add(part, TokenChunk(0, 1, [], embedding=data))
        assembler.add(part, Finish(1, 1, Usage(len(request.prompt), 0), 0, []))
    return assembler


def scores_of(**fields: Any) -> list[float]:
    return [entry.score for entry in assembler_of(score_plan(**fields), SCORE).answer().data]


DIAGONAL = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("text_1", "text_2", "scores"),
    [
        ("x", "xy", [DIAGONAL]),
        ("x", ["x", "y", "xy", "-x"], [1, 0, DIAGONAL, -1]),
        (["x"], ["x", "y"], [1, 0]),
        (["x", "y"], ["y", "xy"], [0, DIAGONAL]),
        (["xy", "xy"], ["xy", "x"], [1, DIAGONAL]),
        ("0", ["x", "0"], [0, 0]),
    ],
)
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_pairs_are_one_to_one_or_one_to_all(
    names: tuple[str, str], text_1: Any, text_2: Any, scores: list[float]
) -> None:
    similarities = scores_of(**{names[0]: text_1, names[1]: text_2})
    assert similarities == pytest.approx(scores, abs=1e-7)


def test_a_text_of_several_pairs_is_embedded_once() -> None:
    plan = score_plan(text_1="x", text_2=["y", "x", "y"], priority=1, cache_salt="s", timeout_s=5)
    assert [request.prompt for request in plan.requests] == ["x", "y"]
    assert plan.options.parts == 2
    for request in plan.requests:
        assert request.embedding == EmbeddingParams(normalize=True)
        assert (request.lane, request.cache_salt, request.timeout_s) == ("batch", "s", 5)
    answer = assembler_of(plan, SCORE).answer()
    assert msgspec.to_builtins(answer) == {
        "id": "the-id",
        "object": "list",
        "created": 123,
        "model": "demo",
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate([0.0, 1.0, 0.0])
        ],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "text_1", "text_1 is missing"),
        ({"text_1": "x"}, "text_2", "text_2 is missing"),
        ({"text_2": "x"}, "text_1", "text_1 is missing"),
        ({"queries": "x"}, "documents", "documents is missing"),
        ({"items": "x"}, "queries", "queries is missing"),
        ({"text_1": "x", "documents": "y"}, "documents", "not text_1, documents"),
        ({"text_1": "x", "text_2": "y", "data_1": "x"}, "data_1", "two fields"),
        ({"text_1": ["x", "y"], "text_2": "x"}, "text_1", "2 texts and text_2 has 1"),
        ({"queries": ["x", "y"], "items": ["x"] * 3}, "queries", "as many as in items"),
        ({"text_1": "x", "text_2": [str(i) for i in range(64)], "durable": True}, "durable", "64"),
    ],
)
def test_refusals_of_scores_name_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        score_plan(**fields)
    assert refused.value.field == field


def test_an_answer_has_an_embedding_of_each_text() -> None:
    assembler = assembler_of(score_plan(text_1="x", text_2="y"), SCORE)
    del assembler.embeddings[1]
    with pytest.raises(WorkerFailure, match="1 of 2 inputs have an embedding"):
        assembler.answer()


def results_of(**fields: Any) -> list[dict[str, Any]]:
    answer = msgspec.to_builtins(assembler_of(rerank_plan(**fields), RERANK).answer())
    assert (answer["id"], answer["model"]) == ("the-id", "demo")
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_documents_are_ranked_by_their_similarity() -> None:
    documents = ["-x", "y", {"text": "x"}, "y", "xy"]
    results = results_of(documents=documents)
    assert [result["index"] for result in results] == [2, 4, 1, 3, 0]
    assert [result["relevance_score"] for result in results] == pytest.approx(
        [1, DIAGONAL, 0, 0, -1]
    )
    assert [result["document"]["text"] for result in results] == ["x", "xy", "y", "y", "-x"]
    assert results_of(documents=documents, top_n=2) == results[:2]
    assert results_of(documents=documents, top_n=0) == results_of(documents=documents, top_n=9)
    without = results_of(documents=documents, return_documents=False)
    assert [result["index"] for result in without] == [2, 4, 1, 3, 0]
    assert not any("document" in result for result in without)


def test_documents_that_are_returned_have_a_limit() -> None:
    # A control character takes six bytes of JSON.
    for documents in (["y" * MAX_RETURNED_BYTES, "x"], ["\x01" * (MAX_RETURNED_BYTES // 6), "x"]):
        with pytest.raises(InvalidRequest, match=str(MAX_RETURNED_BYTES)) as refused:
            rerank_plan(documents=documents, durable=True)
        assert refused.value.field == "return_documents"
        for fields in ({"return_documents": False, "durable": True}, {"durable": False}):
            assert len(rerank_plan(documents=documents, **fields).requests) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_embeddings_that_are_not_finite_have_no_score(value: float) -> None:
    assembler = assembler_of(score_plan(text_1="x", text_2="y"), SCORE)
    data = base64.b64encode(struct.pack("<2f", value, 1.0)).decode()
    assembler.add(1, TokenChunk(0, 1, [], embedding=data))
    with pytest.raises(WorkerFailure, match="not finite"):
        assembler.answer()


def test_embeddings_of_different_lengths_have_no_score() -> None:
    assembler = assembler_of(score_plan(text_1="x", text_2="y"), SCORE)
    data = base64.b64encode(struct.pack("<f", 1.0)).decode()
    assembler.add(1, TokenChunk(0, 1, [], embedding=data))
    with pytest.raises(WorkerFailure, match="different lengths"):
        assembler.answer()


@pytest.mark.parametrize(
    ("kind", "plan", "fields"),
    [
        (SCORE, score_plan(text_1="x", text_2=["y", "x"]), ["text_1", "text_2"]),
        (SCORE, score_plan(queries="x", items="y"), ["queries", "items"]),
        (RERANK, rerank_plan(documents=["y"]), ["query", "documents"]),
    ],
)
def test_errors_of_a_text_name_the_field_that_it_is_from(
    kind: AnswerKind[ScoreOptions], plan: SubmitPlan[ScoreOptions], fields: list[str]
) -> None:
    error = ErrorInfo("context_length_exceeded", "too long", "messages", "client", False)
    for part, field in enumerate(fields):
        assert kind.fields_of(plan.options, part).translate(error).field == field
    assert kind.fields_of(plan.options).translate(error).field == fields[1]
