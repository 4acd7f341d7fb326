"""Limits on the memory of answers that are not streamed, through a real gateway."""

import asyncio
import time
from pathlib import Path

import httpx
import yaml

from tests.cluster.conftest import Cluster
from tests.gateway.conftest import Start, start_gateway_at
from tests.gateway.http.test_middleware import ask, check_error
from tests.gateway.routes.test_requests import long
from workers.gateway.core.memory_budget import MAX_LARGEST

PATH = "/v1/chat/completions"


async def test_embeddings_that_take_too_much_memory_are_refused(another: Start) -> None:
    gateway = another(max_answer_mib=1)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        body = {"model": "demo", "input": ["Hi"] * 256}
        refused = await http.post("/v1/embeddings", json=body)
        assert refused.status_code == 400
        check_error(refused.content, "answer_too_large", "input")
        assert "embeddings" in refused.json()["error"]["message"]


async def test_a_large_answer_is_streamed_or_refused(another: Start) -> None:
    gateway = another(max_answer_mib=1)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        large = long(n=8, max_tokens=100, logprobs=True, top_logprobs=20)
        named = {"x-request-id": f"large-{time.time_ns()}"}
        refused = await http.post(PATH, json=large | {"stream": False}, headers=named)
        assert refused.status_code == 400
        check_error(refused.content, "answer_too_large", "max_tokens")
        # Nothing was stored for the refused request.
        url = f"/v1/requests/{named['x-request-id']}"
        assert (await http.get(url)).status_code == 404

        assert (await http.post(PATH, json=large, headers=named)).status_code == 200
        # The finished answer is too large to be returned whole, too.
        check_error((await http.get(url)).content, "answer_too_large", "id")
        again = await http.post(PATH, json=large | {"stream": False}, headers=named)
        check_error(again.content, "answer_too_large", "max_tokens")
        small = large | {"stream": False, "max_tokens": 1}
        other = await http.post(PATH, json=small, headers=named)
        check_error(other.content, "request_id_reused", "X-Request-Id")
        assert (await http.get(f"{url}/stream")).status_code == 200
        assert (await http.post(PATH, json=small)).status_code == 200

        body = {"model": "demo", "prompt": ["Hi"] * 3, "n": 2, "logprobs": 20, "max_tokens": 60}
        got = await http.post("/v1/completions", json=body)
        check_error(got.content, "answer_too_large", "max_tokens")
        echoed = {"prompt": "a b c d e f " * 40, "n": 1, "echo": True, "max_tokens": 1}
        got = await http.post("/v1/completions", json=body | echoed)
        check_error(got.content, "answer_too_large", "logprobs")
        sampling = {"max_tokens": 60, "n": 8, "logprobs": 20}
        rendered = {"token_ids": [1, 2, 3], "model": "demo", "sampling_params": sampling}
        got = await http.post("/inference/v1/generate", json=rendered)
        assert (got.status_code, got.json()["error"]["code"]) == (400, "answer_too_large")


async def test_without_max_tokens_the_models_limit_counts(cluster: Cluster, tmp_path: Path) -> None:
    tree = yaml.safe_load(cluster.config.read_text())
    del tree["models"]["demo"]["sampling_defaults"]
    gateway = start_gateway_at(
        cluster.url, tree | {"gateway": {"port": 0, "max_answer_mib": 1}}, tmp_path
    )
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
            body = ask(logprobs=True, n=3)
            check_error(
                (await http.post(PATH, json=body)).content, "answer_too_large", "max_tokens"
            )
            assert (await http.post(PATH, json=body | {"max_tokens": 2})).status_code == 200
            assert (await http.post(PATH, json=body | {"stream": True})).status_code == 200
    finally:
        gateway.stop()


async def test_all_large_answers_together_have_a_limit(another: Start) -> None:
    gateway = another(max_answer_mib=1)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        body = long(stream=False, n=1, max_tokens=99, logprobs=True, top_logprobs=20)
        got = await asyncio.gather(*(http.post(PATH, json=body) for _ in range(24)))
        assert {answer.status_code for answer in got} == {200, 503}
        refused = [answer for answer in got if answer.status_code == 503]
        assert all("retry-after" in answer.headers for answer in refused)
        check_error(refused[0].content, "overloaded")
        # All reservations are released.
        for _ in range(MAX_LARGEST + 1):
            assert (await http.post(PATH, json=body)).status_code == 200
