"""`/generate` as the client of vLLM's demo server calls it, with the standard library alone."""

import json
import urllib.request
from collections.abc import Iterator

import httpx

from tests.gateway.conftest import Gateway

PROMPT = "What can"


def post(url: str, prompt: str, n: int, *, stream: bool) -> Iterator[list[str]]:
    """Yield the texts of each line. The client prints them over the texts of the line before."""
    body = {"prompt": prompt, "n": n, "temperature": 0.0, "max_tokens": 60, "stream": stream}
    headers = {"User-Agent": "Test Client", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        for line in response.read().split(b"\n"):
            if line:
                yield json.loads(line)["text"]


async def test_the_demo_client_prints_the_answer(gateway: Gateway) -> None:
    (whole,) = post(gateway.url, PROMPT, 2, stream=False)
    lines = list(post(gateway.url, PROMPT, 2, stream=True))
    assert len(lines) > 1
    for text, before in zip(lines[1:], lines[:-1], strict=True):
        assert all(new.startswith(old) for new, old in zip(text, before, strict=True))
    assert lines[-1] == whole
    assert len(whole) == 2
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) for text in whole)


async def test_an_error_names_the_wrong_field(http: httpx.AsyncClient) -> None:
    for body, field, status in (
        ({"prompt": "a", "temperatur": 1}, "temperatur", 400),
        ({"n": 1}, "prompt", 400),
        ({"prompt": "a", "model": "none"}, "model", 404),
        ({"prompt": "word " * 4000, "stream": True}, "prompt", 400),
    ):
        refused = await http.post("/generate", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)


async def test_the_answer_is_found_by_its_name(http: httpx.AsyncClient) -> None:
    named = {"x-request-id": "demo client 1".replace(" ", "-")}
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
    first = await http.post("/generate", json=body, headers=named)
    again = await http.post("/generate", json=body, headers=named)
    assert first.json() == again.json()
    state = (await http.get("/v1/requests/demo-client-1")).json()
    assert state["result"] == first.json()
