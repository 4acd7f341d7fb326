"""The tools of a response: their names in the prompt, and rules for calls and approvals. Pure."""

import hashlib
import re
from collections.abc import Container, Mapping

import msgspec
from msgspec import Struct

from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool
from shared.protocol.requests import FunctionDefinition, Tool
from shared.protocol.steps import Approval, Begun, Choice, Listed, ServerUse, ToolFilter

PAINT = "image_generation"
"""Name of the image tool, for clients and for models."""


def _paint_tool(description: str, prompt: str) -> Tool:
    schema = {
        "type": "object",
        "properties": {"prompt": {"type": "string", "description": prompt}},
        "required": ["prompt"],
        "additionalProperties": False,
    }
    return Tool(FunctionDefinition(PAINT, description, schema))


PAINT_TOOL = _paint_tool(
    "Paint an image of a text. The user is shown the image.", "what the image shows"
)
EDIT_TOOL = _paint_tool(
    "Change the last image of the conversation. The user is shown the new image.",
    "how the image changes",
)
"""Image tool with a model that edits images."""
MAX_NAME_LEN = 64
MAX_DESCRIPTION_LEN = 1024
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class PromptTool(Struct, frozen=True):
    """A tool as the prompt shows it."""

    tool: Tool
    label: str | None = None
    """Label of the MCP server; None for a function of the client, and for the image tool."""
    listed: ListedTool | None = None
    needs_approval: bool = False
    may_call: bool = True

    @property
    def prompt_name(self) -> str:
        return self.tool.function.name

    @property
    def paints(self) -> bool:
        return self.tool is PAINT_TOOL or self.tool is EDIT_TOOL


class ToolTable:
    """The tools of one turn, by their names in the prompt."""

    def __init__(self, begun: Begun, listings: Mapping[str, Listed], *, has_called: bool) -> None:
        """`has_called` is true if the response has a call already; none is required then."""
        self._begun = begun
        self.mode = "auto" if has_called and begun.choice.mode == "required" else begun.choice.mode
        self.tools: dict[str, PromptTool] = {}
        for function in begun.functions:
            self._add(PromptTool(function, may_call=self._permits(None, function.function.name)))
        if begun.painter is not None:
            paint_tool = EDIT_TOOL if begun.painter.input_images else PAINT_TOOL
            self._add(PromptTool(paint_tool, may_call=self._permits(None, PAINT)))
        for server in begun.servers:
            listing = listings.get(server.label)
            for listed in [] if listing is None else listing.tools:
                if passes(server.allowed, listed) and passes(server.limit, listed):
                    self._add(self._of_server(server, listed))

    def _of_server(self, server: ServerUse, listed: ListedTool) -> PromptTool:
        name = prompt_name(server.label, listed.name, self.tools)
        text = (listed.description or "")[:MAX_DESCRIPTION_LEN]
        if server.description:
            text = f"{server.description[:MAX_DESCRIPTION_LEN]}: {text}"
        definition = FunctionDefinition(name, text or None, listed.input_schema)
        return PromptTool(
            Tool(definition),
            server.label,
            listed,
            needs_approval(server.approval, listed),
            self._permits(server.label, listed.name),
        )

    def _add(self, tool: PromptTool) -> None:
        self.tools[tool.prompt_name] = tool

    def _permits(self, label: str | None, name: str) -> bool:
        return self.mode != "none" and permits(self._begun.choice, label, name)

    @property
    def callable(self) -> list[Tool]:
        """The tools that may be called."""
        return [tool.tool for tool in self.tools.values() if tool.may_call]

    @property
    def is_restricted(self) -> bool:
        """Whether the prompt shows tools that may not be called."""
        return any(not tool.may_call for tool in self.tools.values())

    def find(self, label: str, name: str) -> PromptTool | None:
        """Return a server's tool; None if it does not exist, or the request does not allow it."""
        for tool in self.tools.values():
            if tool.label == label and tool.listed is not None and tool.listed.name == name:
                return tool
        return None


def passes(limits: ToolFilter | None, tool: ListedTool) -> bool:
    """Return whether a filter lets a tool through."""
    if limits is None:
        return True
    if limits.tool_names is not None and tool.name not in limits.tool_names:
        return False
    return limits.read_only is None or limits.read_only == is_read_only(tool)


def is_read_only(tool: ListedTool) -> bool:
    return (tool.annotations or {}).get("readOnlyHint") is True


def is_idempotent(tool: ListedTool) -> bool:
    return (tool.annotations or {}).get("idempotentHint") is True


def needs_approval(approval: Approval, tool: ListedTool) -> bool:
    if isinstance(approval, str):
        return approval == "always"
    if approval.always is not None and passes(approval.always, tool):
        return True
    return not (approval.never is not None and passes(approval.never, tool))


def permits(choice: Choice, label: str | None, name: str) -> bool:
    """Return whether a choice permits calls of a function, or of a tool of a server."""
    if choice.tools is None:
        return True
    return any(ref.label == label and ref.name in (None, name) for ref in choice.tools)


def paint_arguments(prompt: str) -> str:
    return to_json({"prompt": prompt}).decode()


def prompt_of(arguments: str) -> str | None:
    """Return the prompt in the arguments of an image call; None if they have none."""
    try:
        prompt = msgspec.json.decode(arguments).get("prompt")
    except (msgspec.MsgspecError, RecursionError, AttributeError):
        return None
    return prompt if isinstance(prompt, str) and prompt.strip() else None


def schema_digest(tool: ListedTool) -> str:
    """Return the digest of a tool's name and schema, which a person approves with the arguments."""
    return hashlib.sha256(to_json([tool.name, tool.input_schema])).hexdigest()


def prompt_name(label: str, name: str, used_names: Container[str] = ()) -> str:
    """Return the name of a server's tool in the prompt."""
    full = f"{label}__{name}"
    valid = _NOT_IN_NAMES.sub("_", full)
    if valid == full and len(valid) <= MAX_NAME_LEN and valid not in used_names:
        return valid
    digest = hashlib.blake2s(full.encode(), digest_size=4).hexdigest()
    return f"{valid[: MAX_NAME_LEN - 9]}_{digest}"
