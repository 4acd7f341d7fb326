"""Prompts that no renderer would take are refused before the broker stores anything of them."""

import time
from typing import Any

import httpx
import pytest

TEXT = "x " * 2**20
TOOL = {"type": "function", "function": {"name": "f", "description": TEXT}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def asking(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, asking(TEXT), "messages"),
        (CHAT, asking([{"type": "text", "text": text} for text in ("Hi", TEXT)]), "messages"),
        (CHAT, asking("Hi") | {"tools": [TOOL], "tool_choice": "required"}, "messages"),
        (COMPLETIONS, {"prompt": TEXT}, "prompt"),
        (COMPLETIONS, {"prompt": ["Hi", TEXT]}, "prompt"),
        ("/v1/embeddings", {"input": TEXT}, "input"),
    ],
    ids=["message", "part", "tool", "prompt", "second prompt", "embedding"],
)
async def test_a_text_that_is_too_long_is_refused_and_not_stored(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    request_id = f"long-{time.time_ns()}"
    headers = {"x-request-id": request_id}
    refused = await http.post(path, json={"model": "demo"} | body, headers=headers)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "the limit of 16 bytes" in error["message"]
    assert (await http.get(f"/v1/requests/{request_id}")).status_code == 404


async def test_a_large_body_with_little_text_is_answered(http: httpx.AsyncClient) -> None:
    """The limit is on what a template may write, and not on the body."""
    body = {"model": "demo", "max_tokens": 1, "metadata": {"note": TEXT}} | asking("Hi")
    answered = await http.post(CHAT, json=body)
    assert answered.status_code == 200, answered.text
