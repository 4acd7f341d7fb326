"""The header X-Request-Id: every answer and every error has one."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_auth import KEYS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chatcmpl-", CHAT),
    "/v1/completions": ("cmpl-", {"prompt": "Hello", "max_tokens": 3}),
    "/v1/embeddings": ("embd-", {"input": "Hello"}),
    "/v1/score": ("score-", {"text_1": "Hello", "text_2": "A star"}),
    "/v1/rerank": ("rerank-", {"query": "Hello", "documents": ["A star"]}),
    "/inference/v1/generate": ("gen-", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
}

WITHOUT_STREAM = {"/v1/embeddings", "/v1/score", "/v1/rerank"}
STREAMED = [path for path in BODIES if path not in WITHOUT_STREAM]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_and_a_refusal_have_their_id(http: httpx.AsyncClient, path: str) -> None:
    prefix, body = BODIES[path]
    answer = await http.post(path, json=body | {"model": "demo"})
    refused = await http.post(path, json=body | {"model": "demo", "nosuch": 1})
    unread = await http.post(path, content="{", headers={"content-type": "application/json"})
    unknown = await http.post(path, json=body | {"model": "nosuch"})
    assert [answer.status_code, unknown.status_code] == [200, 404]
    assert {refused.status_code, unread.status_code} <= {400, 422}
    ids = [response.headers["x-request-id"] for response in (answer, refused, unread, unknown)]
    assert all(request_id.startswith(prefix) for request_id in ids)
    assert len(set(ids)) == 4


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_has_its_id_before_its_first_event(
    http: httpx.AsyncClient, path: str
) -> None:
    prefix, body = BODIES[path]
    async with http.stream("POST", path, json=body | {"model": "demo", "stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert request_id.startswith(prefix)
    if prefix != "gen-":  # Its events have the id of their protocol.
        assert {json.loads(line[6:])["id"] for line in lines} == {request_id}


async def test_a_name_that_the_client_gave_is_answered_with_one_id(
    http: httpx.AsyncClient,
) -> None:
    headers, body = {"x-request-id": "mine-1"}, CHAT | {"model": "demo"}
    refused = await http.post("/v1/chat/completions", json=body | {"no": 1}, headers=headers)
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    status = await http.get("/v1/requests/mine-1")
    cancelled = await http.delete("/v1/requests/mine-1")
    ids = {r.headers["x-request-id"] for r in (refused, answer, status, cancelled)}
    assert ids == {status.json()["id"], answer.json()["id"]} == {"mine-1"}


async def test_errors_before_any_request_have_an_id(
    http: httpx.AsyncClient, another: Start
) -> None:
    locked = another(api_keys=KEYS)
    async with httpx.AsyncClient(base_url=locked.url, trust_env=False) as stranger:
        no_key = await stranger.post("/v1/chat/completions", json=CHAT)
    nothing = await http.get("/nosuch")
    for response, status in ((no_key, 401), (nothing, 404)):
        assert response.status_code == status
        assert response.headers["x-request-id"].startswith("none-")
    assert "x-request-id" not in (await http.get("/v1/models")).headers


async def test_openais_client_shows_the_id(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(model="demo", **CHAT)
        vectors = await client.embeddings.create(model="demo", input="Hello")
        assert answer._request_id == answer.id
        assert (vectors._request_id or "").startswith("embd-")
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="nosuch", **CHAT)
        assert (refused.value.request_id or "").startswith("chatcmpl-")
