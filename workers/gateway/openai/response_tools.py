"""Tools of a response: functions, MCP servers, and the tools that may be called. Pure."""

from fnmatch import fnmatchcase

from shared.config.schema import AgentConfig
from shared.errors import InvalidRequest
from shared.net.targets import parse_target
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import FunctionDefinition, Tool
from shared.protocol.steps import Approval, Choice, ServerUse, ToolFilter, ToolRef
from shared.responses.tools import PAINT
from shared.tool_calls.grammars import arguments_schema
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
    """Return the client's functions.

    Raises InvalidRequest if two have the same name, or if the arguments of a strict function cannot
    be constrained.
    """
    functions: list[Tool] = []
    for i, tool in enumerate(request.tools or []):
        if isinstance(tool, FunctionTool) and tool.name == PAINT and has_painter(request):
            raise InvalidRequest(f"there are two tools {PAINT!r}", field=f"tools[{i}].name")
        if isinstance(tool, FunctionTool):
            if any(tool.name == other.function.name for other in functions):
                raise InvalidRequest(f"there are two tools {tool.name!r}", field=f"tools[{i}].name")
            definition = FunctionDefinition(
                tool.name, tool.description, tool.parameters, tool.strict
            )
            functions.append(Tool(definition))
            arguments_schema(functions[-1])
    return functions


def has_painter(request: ResponseFields) -> bool:
    return any(isinstance(tool, ImageTool) for tool in request.tools or [])


def servers_of(request: ResponseFields, config: AgentConfig) -> list[ServerUse]:
    """Return the MCP servers. Raises a RequestError for a server that may not be used."""
    servers: list[ServerUse] = []
    for i, tool in enumerate(request.tools or []):
        if isinstance(tool, McpTool):
            field = f"tools[{i}]"
            if any(tool.server_label == other.label for other in servers):
                raise InvalidRequest(
                    f"there are two servers {tool.server_label!r}", field=f"{field}.server_label"
                )
            servers.append(_server_of(tool, config, field))
    if len(servers) > config.max_servers:
        raise InvalidRequest(f"at most {config.max_servers} servers", field="tools")
    return servers


def _server_of(tool: McpTool, config: AgentConfig, field: str) -> ServerUse:
    for name in ("headers", "authorization"):
        if getattr(tool, name):
            raise UnsupportedParameter(
                f"{name} is not supported, because it would be stored with the response,"
                " unencrypted: configure the server and its token in agent.servers",
                field=f"{field}.{name}",
            )
    server = config.servers.get(tool.server_label)
    if server is None:
        _check_url(tool, config, field)
    elif tool.server_url not in (None, server.url):
        raise InvalidRequest(
            f"the server {tool.server_label!r} of the configuration has another URL",
            field=f"{field}.server_url",
        )
    approval: Approval = tool.require_approval or "always"
    if server is not None and server.require_approval == "always":
        approval = "always"
    elif server is not None and server.require_approval is not None:
        approval = tool.require_approval or server.require_approval
    return ServerUse(
        tool.server_label,
        tool.server_url if server is None else None,
        _filter_of(tool.allowed_tools),
        None if server is None else server.allowed_tools,
        approval,
        tool.server_description,
    )


def _check_url(tool: McpTool, config: AgentConfig, field: str) -> None:
    field = f"{field}.server_url"
    if tool.server_url is None:
        raise InvalidRequest(
            f"there is no server {tool.server_label!r} in the configuration (agent.servers), so"
            " server_url is required",
            field=field,
        )
    target = parse_target(tool.server_url)
    if target is None:
        raise InvalidRequest("server_url is not a plain http or https URL", field=field)
    if not any(fnmatchcase(target.host, host) for host in config.mcp_hosts):
        raise InvalidRequest("the host of server_url is not one of agent.mcp_hosts", field=field)
    if target.scheme == "http" and not config.mcp_networks:
        raise InvalidRequest(
            "server_url must be https: only servers in agent.mcp_networks may use http", field=field
        )


def _filter_of(allowed: list[str] | ToolFilter | None) -> ToolFilter | None:
    if isinstance(allowed, list):
        return None if allowed == ["*"] else ToolFilter(allowed)
    return allowed


def choice_of(request: ResponseFields) -> Choice:
    """Return the tools that may be called. Raises InvalidRequest for an unknown tool."""
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not request.tools:
        raise InvalidRequest("tool_choice requires tools", field="tool_choice")
    match choice:
        case FunctionChoice() | McpChoice() | ImageChoice():
            return Choice("required", [_ref_of(choice, request, "tool_choice")])
        case AllowedChoice(mode=mode, tools=tools):
            refs = [
                _ref_of(tool, request, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)
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
    """Raises UnsupportedParameter if calls could not be recognized, or not be constrained."""
    if has_format:
        raise UnsupportedParameter(
            "text.format is not supported for a response that may call tools", field="text.format"
        )
    if choice.mode == "required":
        return
    if card is None or not card.takes_tools or card.tool_parser is None:
        raise UnsupportedParameter(
            f"tools: {request.model} was not trained to call tools: set tool_choice to 'required'"
            " or to a function, which constrains the answer to the form of a call",
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
