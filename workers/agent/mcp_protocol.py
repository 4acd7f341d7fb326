"""Messages of MCP over streamable HTTP, for both eras of the protocol. Pure.

Modern servers, since version 2026-07-28, answer a call in one POST, without handshake or session. A
session with a legacy server begins with `initialize`, and may have an id.
"""

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.protocol.encoding import UNDECODABLE, to_json
from shared.protocol.items import ListedTool
from shared.protocol.json_limits import json_limit_error
from shared.protocol.value_limits import check_json

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024
MAX_LISTING_BYTES = 256 * 1024
"""Limit on all tools of a server. They are stored in one step, which has at most 1 MiB."""
MAX_NAME_LEN = 128
MAX_STREAM_EVENTS = 1024
_IDENTITY = ("uri", "name", "title", "description")
"""Fields that identify a resource."""
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_CLIENT = {"name": "pagemill", "version": "1"}
_META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": _CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}


class McpError(Exception):
    """Raised when a request to an MCP server has no result."""

    retryable = False
    """Whether another attempt may succeed."""
    pause_s: float | None = None
    """Time that the server asks to wait before another attempt."""


class McpFault(McpError):
    """The server may not be used, or its answer is invalid."""


class NotSent(McpError):
    """No byte of the request was sent, so it may be repeated."""

    retryable = True


class OutcomeUnknown(McpError):
    """The request was sent and not answered. It may have been carried out."""

    retryable = True

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class McpRefusal(McpError):
    """The server has refused the request. Nothing was carried out."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.error = error


class SessionLost(McpRefusal):
    """The server does not know the session of the request."""

    retryable = True
    pause_s = 0.0


class ServerBusy(McpRefusal):
    """The server is overloaded: status 429, or 503 with the header Retry-After."""

    retryable = True


def request_body(
    version: str, number: int, method: str, params: Mapping[str, Any], meta: Mapping[str, Any]
) -> bytes:
    all_meta = {**(_META if version == MODERN else {}), **meta}
    all_params = {**params, "_meta": all_meta} if all_meta else params
    return to_json({"jsonrpc": "2.0", "id": number, "method": method, "params": all_params})


def initialize_params() -> dict[str, Any]:
    return {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": _CLIENT}


def request_headers(
    version: str, method: str, name: str | None, session: str | None
) -> list[tuple[str, str]]:
    headers = [
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
        # An uncompressed body cannot grow when it is read.
        ("Accept-Encoding", "identity"),
        ("User-Agent", "pagemill"),
        ("MCP-Protocol-Version", version),
    ]
    if version == MODERN:
        headers.append(("Mcp-Method", method))
        if name is not None:
            headers.append(("Mcp-Name", _header_value(name)))
    if session is not None:
        headers.append(("Mcp-Session-Id", session))
    return headers


def _header_value(text: str) -> str:
    """Return a text in the protocol's encoding for headers, which are ASCII."""
    if text.isascii() and text == text.strip() and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def decode_json(data: bytes) -> Any:
    """Return the decoded value. Raises McpFault for invalid JSON, or JSON over the limits."""
    try:
        check_json(data)
        return msgspec.json.decode(data)
    except UNDECODABLE as error:
        raise McpFault("the server's answer is not valid JSON, or too large or too deep") from error


def answer_of(
    status: int, headers: Mapping[str, str], message: Any, number: int, *, has_session: bool
) -> dict[str, Any]:
    """Return the result in an answer. Raises an McpError.

    `has_session` is true if the request had a session id.
    """
    is_error = isinstance(message, dict) and message.get("id") == number and "error" in message
    pause = headers.get("retry-after", "")
    if status == 429 or (status == 503 and pause):
        busy = ServerBusy(_http_error(status, message))
        busy.pause_s = float(pause) if pause.isdecimal() and len(pause) < 10 else None
        raise busy
    # Servers of older SDKs answer 400 for a session that they do not know.
    if has_session and (status == 404 or (status == 400 and not is_error)):
        raise SessionLost(_http_error(status, message))
    if status != 200 and not is_error:
        error = _http_error(status, message)
        raise OutcomeUnknown(error["message"], status) if status >= 500 else McpRefusal(error)
    return result_of(message, number)


def _http_error(status: int, message: Any) -> dict[str, Any]:
    """Return the error of a call that the server has answered with an HTTP status."""
    text = f"the server answered {status}"
    error = message.get("error") if isinstance(message, dict) else None
    detail = error.get("message") if isinstance(error, dict) else error
    if status in (401, 403):
        text += ": the header Authorization is missing or wrong (agent.servers: headers_env)"
    elif 300 <= status < 400:
        text += ": redirects are not followed; name the URL to which it redirects"
    elif isinstance(detail, str):
        text += f": {detail[:1000]}"
    return {"type": "http_error", "code": status, "message": text}


def result_of(message: Any, number: int) -> dict[str, Any]:
    """Return the result in a message. Raises McpRefusal for an error, McpFault for neither."""
    if not isinstance(message, dict) or message.get("id") not in (number, None):
        raise McpFault("the server's answer does not have the id of the request")
    error = message.get("error")
    if isinstance(error, dict):
        code, text = error.get("code"), error.get("message")
        raise McpRefusal(
            {
                "type": "mcp_protocol_error",
                "code": code if isinstance(code, int) else 0,
                "message": text[:1000] if isinstance(text, str) else "the server has refused",
            }
        )
    result = message.get("result")
    if not isinstance(result, dict):
        raise McpFault("the server's answer has no result")
    return result


class EventReader:
    """Parser that finds the answer to one request in a stream of events."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._buffer = bytearray()
        self._searched = 0
        self._num_events = 0

    def feed(self, data: bytes) -> Any | None:
        """Return the answer once it is complete. Raises McpFault after too many events."""
        self._buffer += data
        # Each byte is searched about once, however small the pieces of a large event are.
        while (end := _BLANK_LINE.search(self._buffer, self._searched)) is not None:
            lines = bytes(self._buffer[: end.start()]).splitlines()
            del self._buffer[: end.end()]
            self._searched = 0
            self._num_events += 1
            if self._num_events > MAX_STREAM_EVENTS:
                raise McpFault(f"the server has sent more than {MAX_STREAM_EVENTS} events")
            text = b"\n".join(
                line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")
            )
            message = decode_json(text) if text else None
            if isinstance(message, dict) and message.get("id") == self._number:
                return message
        self._searched = max(0, len(self._buffer) - 3)
        return None


def tools_of(result: Mapping[str, Any]) -> list[ListedTool]:
    """Return the tools of one page of a listing. Raises McpFault for an invalid tool."""
    tools = result.get("tools")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise McpFault(f"the server's answer has no list of at most {MAX_TOOLS} tools")
    return [_tool_of(tool) for tool in tools]


def fresh_s_of(result: Mapping[str, Any]) -> float:
    """Return how many seconds a page of a listing may be cached; infinity without a limit."""
    ttl_ms = result.get("ttlMs")
    if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int | float):
        return math.inf
    return max(0.0, ttl_ms / 1000)


def check_listing(tools: list[ListedTool]) -> None:
    """Raises McpFault for a listing that does not fit into a step."""
    if len(tools) > MAX_TOOLS:
        raise McpFault(f"the server has more than {MAX_TOOLS} tools")
    if len(to_json(tools)) > MAX_LISTING_BYTES:
        raise McpFault(f"the server's tools have more than {MAX_LISTING_BYTES} bytes")


def _tool_of(value: Any) -> ListedTool:
    if not isinstance(value, dict):
        raise McpFault("a tool of the server is not a JSON object")
    name, schema = value.get("name"), value.get("inputSchema")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LEN or not name.isprintable():
        raise McpFault(f"a tool's name must have 1 to {MAX_NAME_LEN} printable characters")
    if not isinstance(schema, dict):
        raise McpFault(f"the tool {name} has no object inputSchema")
    if len(to_json(schema)) > MAX_SCHEMA_BYTES:
        raise McpFault(f"the schema of {name} has more than {MAX_SCHEMA_BYTES} bytes")
    if message := json_limit_error(schema):
        raise McpFault(f"the schema of {name}: {message}")
    if any(not ref.startswith("#") for ref in _references(schema)):
        raise McpFault(f"the schema of {name} refers to another document")
    text, hints = value.get("description"), value.get("annotations")
    return ListedTool(
        name,
        schema,
        text if isinstance(text, str) else None,
        hints if isinstance(hints, dict) else None,
    )


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [ref for key in ("$ref", "$dynamicRef") if isinstance(ref := value.get(key), str)]
        return own + [ref for inner in value.values() for ref in _references(inner)]
    if isinstance(value, list):
        return [ref for inner in value for ref in _references(inner)]
    return []


def output_of(result: Mapping[str, Any]) -> str:
    """Return the result of a call as a text for the model."""
    if result.get("resultType") == "input_required" or "inputRequests" in result:
        return "the tool asks for further input, which is not supported"
    content = result.get("content")
    parts = content if isinstance(content, list) else []
    texts = [_part_text(part) for part in parts if isinstance(part, dict)]
    if not texts and "structuredContent" in result:
        return to_json(result["structuredContent"]).decode()
    return "\n".join(texts)


def _part_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part of a result, after the fields that identify the part.

    An embedded resource has its content in an inner object. A link has no content.
    """
    resource = part.get("resource")
    inner = resource if isinstance(resource, dict) else part
    names = [inner[name] for name in _IDENTITY if isinstance(inner.get(name), str)]
    data = inner.get("data", inner.get("blob"))
    if isinstance(text := inner.get("text"), str):
        return "\n".join([*names, text])
    names.append(str(inner.get("mimeType") or part.get("type")))
    if isinstance(data, str):
        names.append(f"{len(data) * 3 // 4096} KB")
    return f"[{', '.join(names)}]"


def cut_output(text: str, max_bytes: int) -> str:
    """Return the text, or its beginning with the number of bytes that are left out."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    beginning = data[:max_bytes].decode(errors="ignore")
    return f"{beginning}\n[{len(data) - len(beginning.encode())} more bytes are left out]"
