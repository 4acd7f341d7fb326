"""The requests of Open WebUI, recorded between it and a gateway, with shorter texts.

It has sent them for chats with images and tools, for titles, tags and follow-up questions, and for
a file. The result of a tool is in the form that its source has.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.routes.test_chat import events, star_url
from tests.gateway.routes.test_requests import ended

RECORDED = json.loads((Path(__file__).parent / "recorded" / "open_webui.json").read_text())
REQUESTS: dict[str, Any] = RECORDED["requests"]
CHATS = [name for name, sent in REQUESTS.items() if sent["path"] == "/v1/chat/completions"]


def request_of(http: httpx.AsyncClient, name: str) -> httpx.Request:
    sent = REQUESTS[name]
    body = json.loads(json.dumps(sent["body"]).replace("IMAGE", star_url()))
    return http.build_request("POST", sent["path"], json=body, headers=RECORDED["headers"])


@pytest.mark.parametrize("name", CHATS[:-1])
async def test_a_recorded_chat_is_answered(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.send(request_of(http, name))
    assert answer.status_code == 200, answer.text
    if not REQUESTS[name]["body"]["stream"]:
        assert answer.json()["choices"][0]["message"]["content"]
        return
    *chunks, done = [event for _, event in events(answer.text)]
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "tool_calls", "length")
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert ("yellow" in text) == name.startswith("image")


async def test_models_and_embeddings_for_open_webui(http: httpx.AsyncClient) -> None:
    listed = await http.get("/v1/models", headers=RECORDED["headers"])
    assert [model["id"] for model in listed.json()["data"]] == ["demo"]
    answer = await http.send(request_of(http, "embeddings of a file"))
    assert [item["index"] for item in answer.json()["data"]] == [0, 1]


async def test_a_chat_is_cancelled_when_open_webui_stops_it(http: httpx.AsyncClient) -> None:
    """Its stop button closes the connection. The request has all parameters of its settings."""
    answer = await http.send(request_of(http, CHATS[-1]), stream=True)
    assert answer.status_code == 200, await answer.aread()
    await anext(answer.aiter_lines())
    await answer.aclose()
    assert (await ended(http, answer.headers["x-request-id"]))["state"] == "cancelled"
