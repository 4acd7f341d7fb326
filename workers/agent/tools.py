"""Listing and calls of a response's tools.

Each call has a step in the log before its first byte is sent.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec

from shared.config.schema import AgentConfig
from shared.net.targets import parse_target
from shared.protocol.items import ListToolsItem
from shared.protocol.steps import Listed, Result, Sending
from shared.responses.calls import ServerCall
from shared.responses.conversation import Entry
from shared.responses.state import OVER_LIMIT, unknown_error
from shared.responses.tools import is_idempotent, is_read_only
from shared.state.step_log import StepLog
from workers.agent.mcp_client import McpClient, Server
from workers.agent.mcp_protocol import McpError, McpFault, McpRefusal, cut_output, output_of
from workers.agent.mcp_session import McpSession


class ToolRunner:
    """Client of the MCP servers of one response."""

    def __init__(self, config: AgentConfig, client: McpClient, log: StepLog) -> None:
        self._config = config
        self._client = client
        self._log = log
        self._sessions: dict[str, McpSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await asyncio.gather(*(session.aclose() for session in self._sessions.values()))

    # -- listing ----------------------------------------------------------------------------------

    async def list_tools(self, label: str) -> Listed:
        """Return the tools of a server, or the reason why they are unknown."""
        try:
            return Listed(0, label, await self._session(label).list_tools())
        except McpError as error:
            return Listed(0, label, error=str(error), retryable=error.retryable)

    def _session(self, label: str) -> McpSession:
        """Return the session with a server. Raises McpFault if the server may not be used."""
        if label not in self._sessions:
            self._sessions[label] = McpSession(self._client, self._server(label))
        return self._sessions[label]

    def _server(self, label: str) -> Server:
        begun = self._log.state.begun
        assert begun is not None
        config = self._config.servers.get(label)
        use = next(server for server in begun.servers if server.label == label)
        url = use.url if config is None else config.url
        target = None if url is None else parse_target(url)
        if target is None:
            raise McpFault(f"there is no server {label!r} in the configuration of this agent")
        variables = {} if config is None else config.headers_env
        headers = tuple((name, os.environ.get(key, "")) for name, key in variables.items())
        for name, value in headers:
            if not value:
                raise McpFault(f"the agent has no value for the header {name}")
            if not value.isascii() or not value.isprintable():
                raise McpFault(f"the agent's value for the header {name} is not printable ASCII")
        return Server(begun.tenant, label, target, headers)

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, call: ServerCall, attempt: int) -> Result:
        """Make a call, and return its result. Raises Fenced before anything is sent."""
        arguments = _arguments_of(call)
        if arguments is None:
            return _failed(call, "the arguments are not a JSON object")
        response_id = self._log.response_id
        key = f"{response_id}.{call.turn}.{call.number}"
        digest = hashlib.sha256(call.arguments.encode()).hexdigest()
        sending = Sending(
            0,
            call.turn,
            call.number,
            attempt,
            key,
            digest,
            secrets.token_hex(8),
            self._may_repeat(call),
        )
        server = self._config.servers.get(call.label)
        takes_key = server is not None and server.idempotency == "header"
        try:
            result = await self._session(call.label).call(
                call.name, arguments, key if takes_key else None, lambda: self._mark(sending)
            )
        except McpRefusal as error:
            if attempt > 0:  # The refusal says nothing about earlier attempts.
                return self.unknown(call, str(error))
            return Result(0, call.turn, call.number, "failed", error=error.error)
        except McpError as error:
            return self._after_fault(call, str(error))
        return self._result(call, result)

    async def _mark(self, sending: Sending) -> None:
        await self._log.append(sending)

    def _may_repeat(self, call: ServerCall) -> bool:
        server = self._config.servers.get(call.label)
        if server is None or call.tool is None or call.tool.listed is None:
            return False
        listed = call.tool.listed
        trusted = server.trust_annotations and (is_read_only(listed) or is_idempotent(listed))
        return trusted or server.idempotency == "header"

    def _after_fault(self, call: ServerCall, message: str) -> Result:
        """Return the result of a call without a readable answer.

        If the call was sent, in this attempt or an earlier one, it may have been carried out. It
        was not sent if no session could be opened.
        """
        return self.unknown(call, message) if call.sendings else _failed(call, message)

    def unknown(self, call: ServerCall, reason: str) -> Result:
        """Return the result of a call with an unknown outcome, by the setting `agent.unknown`."""
        error = unknown_error(reason)
        ask, fatal = self._config.unknown == "approve", self._config.unknown == "fail"
        return Result(0, call.turn, call.number, "unknown", error=error, ask=ask, fatal=fatal)

    def _result(self, call: ServerCall, result: dict[str, Any]) -> Result:
        limit = self._config.max_output_kib * 1024
        output = cut_output(output_of(result), limit)
        if result.get("isError") is True:
            content = [{"type": "text", "text": output}]
            error = {"type": "mcp_tool_execution_error", "content": content}
            return Result(0, call.turn, call.number, "failed", error=error)
        return Result(0, call.turn, call.number, "result", output)


def inherited_listing(label: str, conversation: Sequence[Entry]) -> Listed | None:
    """Return the tools of a server from the conversation, if an earlier response has them."""
    for entry in conversation:
        item = entry.item
        if isinstance(item, ListToolsItem) and item.server_label == label and not item.error:
            return Listed(0, label, item.tools, inherited=True)
    return None


def refused(call: ServerCall, why: Literal["limit", "gone", "changed"]) -> Result:
    """Return the result of a call that is not made."""
    if why == "limit":
        return _failed(call, OVER_LIMIT)
    if why == "changed":
        message = "not called: the tool's schema has changed since the call was approved"
        result = _failed(call, message)
        return msgspec.structs.replace(result, ask=True)
    return _failed(call, "not called: the server has no such tool, or it may not be called")


def without_content(result: Result) -> Result:
    """Return the result with an error in place of its text, which has control tokens."""
    error = _protocol_error("the result of the tool has control tokens of the model in its text")
    outcome = "failed" if result.outcome == "result" else result.outcome
    return msgspec.structs.replace(result, outcome=outcome, output=None, error=error)


def _failed(call: ServerCall, message: str) -> Result:
    error = _protocol_error(message)
    if call.paints:
        error = {"type": "image_generation_error", "message": message}
    return Result(0, call.turn, call.number, "failed", error=error)


def _protocol_error(message: str) -> dict[str, Any]:
    return {"type": "mcp_protocol_error", "code": 0, "message": message}


def _arguments_of(call: ServerCall) -> dict[str, Any] | None:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
