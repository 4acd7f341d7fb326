"""The cases of all clients, and their results over plain HTTP."""

import base64
import json
from typing import Any

import httpx

from workers.settings import OPS

CHAT = "/v1/chat/completions"
IMAGE = OPS / "demo_images" / "five_hearts.png"
RECORDING = OPS / "demo_recordings" / "seven.flac"
QUESTION, TEXT = "What do you see?", "Who are you?"
# More than the batches of most servers, less than those of any client.
NUM_INPUTS = 300
NUM_LINES = 3


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return schema | {"additionalProperties": False}


COLOUR = {"type": "string", "enum": ["red", "yellow"]}
TOOL = {
    "name": "paint",
    "description": "Paint a shape.",
    "parameters": _object(colour=COLOUR),
    "strict": True,
}
SCHEMA = _object(colour=COLOUR, round={"type": "boolean"})


def make_cases(name: str) -> dict[str, Any]:
    """Return the questions and files for a client, and the headers that name its requests."""
    url = f"data:image/png;base64,{base64.b64encode(IMAGE.read_bytes()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    line = {"method": "POST", "url": CHAT, "body": {"model": "demo", "messages": messages}}
    lines = [json.dumps({"custom_id": str(number)} | line) for number in range(NUM_LINES)]
    return {
        "messages": messages,
        "image": url,
        "question": QUESTION,
        "text": TEXT,
        "prompt": "a red circle on blue",
        "recording": str(RECORDING),
        "inputs": [f"text {number}" for number in range(NUM_INPUTS)],
        "tool": TOOL,
        "tool_result": "painted",
        "schema": SCHEMA,
        "lines": "\n".join(lines),
        "cancel": {"X-Request-Id": f"cancel-{name}"},
        "timeout": {"X-Request-Id": f"timeout-{name}"},
    }


def plain_results(http: httpx.Client) -> dict[str, Any]:
    """Return the result that each check of a client should have."""
    cases = make_cases("plain")
    answer = _post(http, CHAT, messages=cases["messages"])
    chat = answer["choices"][0]["message"]["content"]
    first = _post(http, "/v1/responses", input=TEXT)
    second = _post(http, "/v1/responses", input=TEXT, previous_response_id=first["id"])
    whole, continued = (answer["output"][0]["content"][0]["text"] for answer in (first, second))
    vectors = _post(http, "/v1/embeddings", input=cases["inputs"])["data"]
    [painted] = _post(http, "/v1/images/generations", prompt=cases["prompt"])["data"]
    speech = {"model": "demo", "voice": "alloy", "input": TEXT}
    tools = _call_tool(http, cases)
    form: dict[str, Any] = {"data": {"model": "hearing"}, "files": {"file": RECORDING.read_bytes()}}
    return {
        "chat": chat,
        "stream": chat,
        "tools": tools,
        "streamed_tools": tools[0],
        "structured": _write_object(http, cases),
        "embeddings": [NUM_INPUTS, vectors[-1]["embedding"]],
        "speech": len(http.post("/v1/audio/speech", json=speech).content),
        "transcription": http.post("/v1/audio/transcriptions", **form).json()["text"],
        # The signature of PNG, and the size of the image.
        "image": painted["b64_json"][:32],
        "responses": [whole, whole, continued],
        "batch": NUM_LINES,
        "tokens": answer["usage"]["prompt_tokens"],
    }


def final_state(http: httpx.Client, request_id: str) -> str:
    """Wait for the end of a request, and return its state."""
    while True:
        state: str = http.get(f"/v1/requests/{request_id}").json()["state"]
        if state in ("finished", "cancelled", "failed"):
            return state


def _call_tool(http: httpx.Client, cases: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call, and the answer to its result."""
    tools, messages = [{"type": "function", "function": TOOL}], cases["messages"]
    body = {"messages": messages, "tools": tools, "tool_choice": "required"}
    call = _post(http, CHAT, **body)["choices"][0]["message"]["tool_calls"][0]
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": cases["tool_result"]},
    ]
    after = _post(http, CHAT, messages=messages + turns, tools=tools)
    return [json.loads(call["function"]["arguments"]), after["choices"][0]["message"]["content"]]


def _write_object(http: httpx.Client, cases: dict[str, Any]) -> Any:
    style = {"name": "shape", "schema": SCHEMA, "strict": True}
    body = {"response_format": {"type": "json_schema", "json_schema": style}}
    answer = _post(http, CHAT, messages=cases["messages"], **body)
    return json.loads(answer["choices"][0]["message"]["content"])


def _post(http: httpx.Client, path: str, **fields: Any) -> Any:
    return http.post(path, json={"model": "demo"} | fields).raise_for_status().json()
