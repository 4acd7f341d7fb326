"""Scores and rerankings against a gateway, with the similarities of transformers' hidden states."""

from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.state import request_registry
from tests.gateway.conftest import Gateway
from tests.gateway.routes.test_chat import ROOT

MODEL = ROOT / "ops" / "demo_model"
QUERY, DOCUMENTS = "A red star", ["Hello there", "A star", "A red star", "Hello there"]


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], int]:
    """Scores of the query with each document, and the number of tokens of all different texts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()

    def embed(text: str) -> Any:
        with torch.no_grad():
            states = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        last = states[0, -1].double().numpy()
        return last / np.linalg.norm(last)

    scores = [float(embed(QUERY) @ embed(document)) for document in DOCUMENTS]
    texts = {QUERY, *DOCUMENTS}
    return scores, sum(len(tokenizer(text)["input_ids"]) for text in texts)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_are_similarities_of_embeddings(
    http: httpx.AsyncClient, expected: tuple[list[float], int], path: str
) -> None:
    scores, num_tokens = expected
    for text_1 in (QUERY, [QUERY], [QUERY] * len(DOCUMENTS)):
        body = {"model": "demo", "text_1": text_1, "text_2": DOCUMENTS}
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        result = answer.json()
        assert set(result) == {"id", "object", "created", "model", "data", "usage"}
        assert (result["object"], result["model"]) == ("list", "demo")
        assert result["id"] == answer.headers["x-request-id"]
        assert [entry["index"] for entry in result["data"]] == list(range(len(DOCUMENTS)))
        assert {entry["object"] for entry in result["data"]} == {"score"}
        assert [entry["score"] for entry in result["data"]] == pytest.approx(scores, abs=1e-5)
        assert result["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(
    http: httpx.AsyncClient, expected: tuple[list[float], int], path: str
) -> None:
    scores, num_tokens = expected
    body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    ranking = (await http.post(path, json=body)).json()
    assert set(ranking) == {"id", "model", "results", "usage"}
    results = ranking["results"]
    assert len(results) == 3
    order = [result["index"] for result in results]
    assert order[0] == 2, "the query itself"
    ranked = sorted(scores, reverse=True)[:3]
    assert [result["relevance_score"] for result in results] == pytest.approx(ranked, abs=1e-5)
    assert [result["document"] for result in results] == [{"text": DOCUMENTS[i]} for i in order]
    assert ranking["usage"]["total_tokens"] == num_tokens


@pytest.mark.parametrize(
    ("path", "changed", "code", "param"),
    [
        ("/v1/score", {"text_2": None}, "invalid_request", "text_2"),
        ("/v1/score", {"text_1": ["x", "y"]}, "invalid_request", "text_1"),
        ("/v1/score", {"text_2": []}, "invalid_request", "text_2"),
        ("/v1/score", {"text_2": [5]}, "invalid_request", "text_2[0]"),
        ("/v1/score", {"text_2": "long " * 3000}, "context_length_exceeded", "text_2"),
        ("/v1/score", {"text_1": "long " * 3000}, "context_length_exceeded", "text_1"),
        ("/v1/score", {"model": "nosuch"}, "unknown_model", "model"),
        ("/v1/score", {"adapter": "nosuch"}, "unknown_adapter", "adapter"),
        ("/v1/score", {"nosuch": 1}, "unknown_parameter", "nosuch"),
        (
            "/v1/score",
            {"truncate_prompt_tokens": 5},
            "unsupported_parameter",
            "truncate_prompt_tokens",
        ),
        ("/v1/rerank", {"documents": []}, "invalid_request", "documents"),
        ("/v1/rerank", {"top_n": -1}, "invalid_request", "top_n"),
        ("/v1/rerank", {"query": "long " * 3000}, "context_length_exceeded", "query"),
        ("/v2/rerank", {"max_tokens_per_doc": 5}, "unsupported_parameter", "max_tokens_per_doc"),
    ],
)
async def test_refusals_name_the_field(
    http: httpx.AsyncClient, path: str, changed: dict[str, Any], code: str, param: str
) -> None:
    texts: dict[str, Any] = {"text_1": "x", "text_2": "y"}
    if "rerank" in path:
        texts = {"query": "x", "documents": ["y"]}
    answer = await http.post(path, json={"model": "demo"} | texts | changed)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
    ],
)
async def test_a_repeated_id_has_the_same_answer_and_is_not_run_again(
    gateway: Gateway, bus: Bus, path: str, body: dict[str, Any]
) -> None:
    name = f"scored-twice{path.replace('/', '-')}"
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        headers, body = {"x-request-id": name}, {"model": "demo", "durable": True} | body
        published: list[str] = []
        # Also messages that the stream drops as duplicates.
        await bus.watch_subjects(subjects.REQUESTS_FILTER, published.append)
        answers = []
        for _ in range(2):
            answers.append((await http.post(path, json=body, headers=headers)).json())
            await bus.figures.sequence_range(subjects.REQUESTS_STREAM)  # after the messages
            assert len(published) == len({QUERY, *DOCUMENTS})
        other = await http.post(path, json=body | {"cache_salt": "s"}, headers=headers)
        status = (await http.get(f"/v1/requests/{name}")).json()
    assert answers[0] == answers[1] == status["result"]
    assert other.status_code == 422


@pytest.mark.parametrize("fields", [{}, {"durable": True}, {"x-request-id": "ranked-documents"}])
async def test_documents_are_stored_only_for_requests_that_are_answered_again(
    http: httpx.AsyncClient, bus: Bus, fields: dict[str, Any]
) -> None:
    headers = fields if "x-request-id" in fields else {}
    body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS}
    answer = await http.post("/v1/rerank", json=body if headers else body | fields, headers=headers)
    assert all("document" in result for result in answer.json()["results"])
    request_id = answer.headers["x-request-id"]
    record = await request_registry.find(bus, request_id)
    assert record is not None
    assert record.options.get("documents") == (DOCUMENTS if fields else None)
    results = (await http.get(f"/v1/requests/{request_id}")).json()["result"]["results"]
    for result, again in zip(answer.json()["results"], results, strict=True):
        without = {name: value for name, value in result.items() if name != "document"}
        assert again == (result if fields else without)


@pytest.mark.parametrize(
    ("path", "texts", "field"),
    [
        ("/v1/rerank", {"query": "", "documents": ["y"]}, "query"),
        ("/v1/score", {"text_1": "", "text_2": "y"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ""}, "text_2"),
    ],
)
async def test_a_text_of_many_times_the_context_is_refused_with_its_field(
    http: httpx.AsyncClient, bus: Bus, path: str, texts: dict[str, Any], field: str
) -> None:
    texts = {name: text or "x" * bus.max_payload for name, text in texts.items()}
    answer = await http.post(path, json={"model": "demo"} | texts)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field), error
