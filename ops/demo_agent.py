"""The demo's answer with a tool: an image, a call of a local MCP server, and the model's answer."""

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.demo_media import DemoFailed
from ops.tool_server import LocalToolServer
from workers.cli.ask import data_url

LABEL = "names"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"letter": {"type": "string"}},
    "required": ["letter"],
    "additionalProperties": False,
}
TOOL = {"name": "lookup", "description": "The name behind a letter.", "inputSchema": SCHEMA}
# No model can know these.
NAMES = {"k": "Karla", "7": "Sven"}
# The agent starts with the first response.
TIMEOUT_S = 60.0


class NameServer(LocalToolServer):
    """An MCP server with a tool that returns the name for a letter."""

    def __init__(self) -> None:
        super().__init__(TOOL)

    async def call(self, arguments: dict[str, Any]) -> str:
        return NAMES.get(str(arguments["letter"]).lower(), "nobody")


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer, and the calls of tools that led to it."""

    question: str
    calls: list[str]
    outputs: list[str]
    text: str

    def find_fault(self, expect: str) -> str | None:
        """Return the fault of the answer; None for a right one."""
        if self.outputs != [expect]:
            return f"the tool should return {expect} once"
        return None if expect in self.text else f"the answer should contain {expect}"


async def ask_with_tool(gateway_url: str, image: Path, question: str) -> ToolAnswer:
    """Ask about an image, with the tool, over HTTP. Raises DemoFailed."""
    content = [
        {"type": "input_image", "image_url": data_url(image)},
        {"type": "input_text", "text": question},
    ]
    body = {
        "model": "demo",
        "input": [{"role": "user", "content": content}],
        "tools": [{"type": "mcp", "server_label": LABEL}],
        # A model of this size seldom decides by itself to call a tool.
        "tool_choice": "required",
    }
    response = await asyncio.to_thread(_post, f"{gateway_url}/v1/responses", body)
    if response.get("status") != "completed":
        raise DemoFailed(f"the response has failed: {response.get('error') or response}")
    items = response["output"]
    calls = [item for item in items if item["type"] == "mcp_call"]
    parts = [
        part["text"] for item in items if item["type"] == "message" for part in item["content"]
    ]
    return ToolAnswer(
        question,
        [f"{call['name']}({call['arguments']})" for call in calls],
        [str(call["output"]) for call in calls],
        "".join(parts),
    )


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON without a proxy, and return the answer. Raises DemoFailed."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            response: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise DemoFailed(f"the response is refused: {error.read().decode()}") from error
    except OSError as error:
        raise DemoFailed(f"the gateway does not answer: {error}") from error
    return response
