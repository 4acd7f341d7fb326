"""Tools of a request for a response: functions, MCP servers, and which may be called. Pure."""

from fnmatch import fnmatchcase

from shared.config.schema import AgentConfig
from shared.errors import InvalidRequest
from shared.net.targets import parse_target
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import FunctionDefinition, Tool
from shared.protocol.steps import Approval, Choice, ServerUse, ToolFilter, ToolRef
from shared.responses.tools import PAINT
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.responses import (
    AllowedChoice,
    FunctionChoice,
    FunctionTool,
    ImageChoice,
    ImageTool,
    McpChoice,
    McpTool,
    NamedChoice,
    ResponseFields,
)


def functions_of(request: ResponseFields) -> list[Tool]:
    """Return the functions of the client. Raises InvalidRequest for a name that is used twice."""
    found: list[Tool] = []
    for i, tool in enumerate(request.tools or []):
        if isinstance(tool, FunctionTool) and tool.name == PAINT and has_painter(request):
            raise InvalidRequest(f"there are two tools {PAINT!r}", field=f"tools[{i}].name")
        if isinstance(tool, FunctionTool):
            if any(tool.name == other.function.name for other in found):
                raise InvalidRequest(f"there are two tools {tool.name!r}", field=f"tools[{i}].name")
            definition = FunctionDefinition(
                tool.name, tool.description, tool.parameters, tool.strict
            )
            found.append(Tool(definition))
    return found


def has_painter(request: ResponseFields) -> bool:
    return any(isinstance(tool, ImageTool) for tool in request.tools or [])


def servers_of(request: ResponseFields, config: AgentConfig) -> list[ServerUse]:
    """Return the MCP servers. Raises a RequestError for one that may not be used."""
    found: list[ServerUse] = []
    for i, tool in enumerate(request.tools or []):
        if isinstance(tool, McpTool):
            field = f"tools[{i}]"
            if any(tool.server_label == other.label for other in found):
                raise InvalidRequest(
                    f"there are two servers {tool.server_label!r}", field=f"{field}.server_label"
                )
            found.append(_server_of(tool, config, field))
    if len(found) > config.max_servers:
        raise InvalidRequest(f"at most {config.max_servers} servers", field="tools")
    return found


def _server_of(tool: McpTool, config: AgentConfig, field: str) -> ServerUse:
    for name in ("headers", "authorization"):
        if getattr(tool, name):
            raise UnsupportedParameter(
                f"{name} would have to be stored with the response, in clear: name a server of the"
                " configuration, whose tokens stay with the agent",
                field=f"{field}.{name}",
            )
    known = config.servers.get(tool.server_label)
    if known is None:
        _check_url(tool, config, field)
    elif tool.server_url not in (None, known.url):
        raise InvalidRequest(
            f"the server {tool.server_label!r} of the configuration has another URL",
            field=f"{field}.server_url",
        )
    approval: Approval = tool.require_approval or "always"
    if known is not None and known.require_approval == "always":
        approval = "always"
    elif known is not None and known.require_approval is not None:
        approval = tool.require_approval or known.require_approval
    return ServerUse(
        tool.server_label,
        tool.server_url if known is None else None,
        _filter_of(tool.allowed_tools),
        None if known is None else known.allowed_tools,
        approval,
        tool.server_description,
    )


def _check_url(tool: McpTool, config: AgentConfig, field: str) -> None:
    field = f"{field}.server_url"
    if tool.server_url is None:
        raise InvalidRequest(
            f"there is no server {tool.server_label!r} in the configuration (agent.servers), and"
            " no server_url",
            field=field,
        )
    target = parse_target(tool.server_url)
    if target is None:
        raise InvalidRequest("this is not a plain http or https URL", field=field)
    if not any(fnmatchcase(target.host, host) for host in config.mcp_hosts):
        raise InvalidRequest("this host is not one of agent.mcp_hosts", field=field)
    if target.scheme == "http" and not config.mcp_networks:
        raise InvalidRequest("a server of agent.mcp_networks alone may do without TLS", field=field)


def _filter_of(given: list[str] | ToolFilter | None) -> ToolFilter | None:
    if isinstance(given, list):
        return None if given == ["*"] else ToolFilter(given)
    return given


def choice_of(request: ResponseFields) -> Choice:
    """Return which tools may be called. Raises InvalidRequest for a tool that is not there."""
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not request.tools:
        raise InvalidRequest("tool_choice requires tools", field="tool_choice")
    match choice:
        case FunctionChoice() | McpChoice() | ImageChoice():
            return Choice("required", [_ref_of(choice, request, "tool_choice")])
        case AllowedChoice(mode=mode, tools=allowed):
            refs = [
                _ref_of(one, request, f"tool_choice.tools[{i}]") for i, one in enumerate(allowed)
            ]
            return Choice(mode, refs)
        case _:
            return Choice(choice or "auto")


def _ref_of(choice: NamedChoice, request: ResponseFields, field: str) -> ToolRef:
    tools = request.tools or []
    if isinstance(choice, ImageChoice):
        if not has_painter(request):
            raise InvalidRequest(f"there is no tool {PAINT!r}", field=f"{field}.type")
        return ToolRef(PAINT)
    if isinstance(choice, FunctionChoice):
        if not any(isinstance(tool, FunctionTool) and tool.name == choice.name for tool in tools):
            raise InvalidRequest(f"there is no tool {choice.name!r}", field=f"{field}.name")
        return ToolRef(choice.name)
    label = choice.server_label
    if not any(isinstance(tool, McpTool) and tool.server_label == label for tool in tools):
        raise InvalidRequest(f"there is no server {label!r}", field=f"{field}.server_label")
    return ToolRef(choice.name, label)


def check_calls(
    request: ResponseFields,
    choice: Choice,
    card: ModelCard | None,
    *,
    has_format: bool,
) -> None:
    """Raises UnsupportedParameter if the calls could not be found, or not be constrained."""
    if has_format:
        raise UnsupportedParameter(
            "text.format is not supported for a response that may call tools", field="text.format"
        )
    if choice.mode == "required":
        return
    if card is None or not card.takes_tools or card.tool_parser is None:
        raise UnsupportedParameter(
            f"tools: {request.model} was not trained to call tools; with tool_choice 'required' or"
            " a named tool its answer is constrained to the form of a call",
            field="tools",
        )
    strict = next(
        (i for i, t in enumerate(request.tools or []) if isinstance(t, FunctionTool) and t.strict),
        None,
    )
    if strict is not None and card.call_signs is None:
        raise UnsupportedParameter(
            f"{request.model} writes calls in a format that cannot be constrained while calls are"
            " optional: leave strict out, or set tool_choice to 'required' or to a function",
            field=f"tools[{strict}].strict",
        )
