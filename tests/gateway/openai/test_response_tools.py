"""Tools of a response: functions, MCP servers, which may be called, and what is refused."""

from typing import Any

import msgspec
import pytest

from shared.config.schema import AgentConfig, McpServerConfig
from shared.errors import RequestError
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.steps import ApprovalFilters, Choice, ServerUse, ToolFilter, ToolRef
from workers.gateway.openai.response_tools import check_calls, choice_of, functions_of, servers_of
from workers.gateway.schemas.responses import ResponseFields

NOW: dict[str, Any] = {"type": "function", "name": "now"}
CALC: dict[str, Any] = {"type": "mcp", "server_label": "calc"}
WEB: dict[str, Any] = {
    "type": "mcp",
    "server_label": "web",
    "server_url": "https://tools.example/mcp",
}
CONFIG = AgentConfig(
    servers={"calc": McpServerConfig("https://calc.example/mcp")},
    mcp_hosts=["*.example"],
    max_servers=2,
)
HERMES = ModelCard("m", 1024, 300, False, True, "hermes", [7, 8])


def fields_with(tools: list[dict[str, Any]], **changes: Any) -> ResponseFields:
    return msgspec.convert({"model": "m", "tools": tools} | changes, ResponseFields)


def server_with(config: AgentConfig = CONFIG, **tool: Any) -> ServerUse:
    (server,) = servers_of(fields_with([tool]), config)
    return server


# -- functions -------------------------------------------------------------------------------------


def test_functions_are_separated_from_servers_and_keep_their_order() -> None:
    strict = NOW | {"name": "add", "strict": True, "description": "Adds.", "parameters": {"a": 1}}
    first, second = functions_of(fields_with([strict, CALC, NOW]))
    assert msgspec.to_builtins(first.function) == {
        "name": "add",
        "description": "Adds.",
        "parameters": {"a": 1},
        "strict": True,
    }
    assert second.function.name == "now"
    assert functions_of(msgspec.convert({"model": "m"}, ResponseFields)) == []


def test_a_name_that_is_used_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="two tools 'now'") as refused:
        functions_of(fields_with([NOW, CALC, NOW]))
    assert refused.value.field == "tools[2].name"


# -- servers ---------------------------------------------------------------------------------------


def test_a_server_of_the_configuration_is_named_by_its_label() -> None:
    assert server_with(**CALC) == ServerUse("calc")
    assert server_with(**CALC, server_url="https://calc.example/mcp") == ServerUse("calc")
    limit = ToolFilter(["add"])
    server = McpServerConfig("https://calc.example/mcp", allowed_tools=limit)
    limited = server_with(AgentConfig(servers={"calc": server}), **CALC, allowed_tools=["add", "b"])
    assert (limited.limit, limited.allowed) == (limit, ToolFilter(["add", "b"]))


def test_a_server_by_its_url_keeps_what_the_request_says() -> None:
    server = server_with(
        **WEB,
        allowed_tools={"read_only": True},
        require_approval="never",
        server_description="Looks things up.",
    )
    assert server == ServerUse(
        "web",
        "https://tools.example/mcp",
        ToolFilter(read_only=True),
        approval="never",
        description="Looks things up.",
    )
    assert server_with(**WEB, allowed_tools=["*"]).allowed is None


@pytest.mark.parametrize(
    ("configured", "requested", "approval"),
    [
        (None, None, "always"),
        (None, "never", "never"),
        ("always", None, "always"),
        ("always", "never", "always"),
        ("never", None, "never"),
        ("never", "always", "always"),
        ("never", {"never": {"tool_names": ["a"]}}, ApprovalFilters(None, ToolFilter(["a"]))),
    ],
)
def test_a_request_cannot_waive_a_configured_approval(
    configured: Any, requested: Any, approval: Any
) -> None:
    server = McpServerConfig("https://calc.example/mcp", require_approval=configured)
    config = AgentConfig(servers={"calc": server})
    assert server_with(config, **CALC, require_approval=requested).approval == approval


@pytest.mark.parametrize(
    ("tool", "code", "field"),
    [
        (CALC | {"headers": {"a": "b"}}, "unsupported_parameter", "headers"),
        (WEB | {"authorization": "secret"}, "unsupported_parameter", "authorization"),
        (CALC | {"server_url": "https://other.example"}, "invalid_request", "server_url"),
        (CALC | {"server_label": "gone"}, "invalid_request", "server_url"),
        (WEB | {"server_url": "ftp://tools.example"}, "invalid_request", "server_url"),
        (WEB | {"server_url": "https://a@tools.example"}, "invalid_request", "server_url"),
        (WEB | {"server_url": "https://tools.example.org"}, "invalid_request", "server_url"),
        (WEB | {"server_url": "http://tools.example"}, "invalid_request", "server_url"),
    ],
)
def test_a_server_that_may_not_be_used_is_refused(
    tool: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        servers_of(fields_with([NOW, tool]), CONFIG)
    assert (refused.value.code, refused.value.field) == (code, f"tools[1].{field}")
    assert "secret" not in refused.value.message


def test_private_networks_may_do_without_tls() -> None:
    config = AgentConfig(mcp_hosts=["127.0.0.1"], mcp_networks=["127.0.0.0/8"])
    url = "http://127.0.0.1:8000/mcp"
    assert server_with(config, **WEB | {"server_url": url}).url == url


def test_servers_have_labels_of_their_own_and_a_limit() -> None:
    with pytest.raises(RequestError, match="two servers 'calc'") as refused:
        servers_of(fields_with([CALC, CALC]), CONFIG)
    assert refused.value.field == "tools[1].server_label"
    assert [server.label for server in servers_of(fields_with([CALC, WEB]), CONFIG)] == [
        "calc",
        "web",
    ]
    with pytest.raises(RequestError, match="at most 2 servers") as refused:
        servers_of(fields_with([CALC, WEB, WEB | {"server_label": "third"}]), CONFIG)
    assert refused.value.field == "tools"


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, Choice("auto")),
        ("none", Choice("none")),
        ("required", Choice("required")),
        ({"type": "function", "name": "now"}, Choice("required", [ToolRef("now")])),
        ({"type": "mcp", "server_label": "calc"}, Choice("required", [ToolRef(None, "calc")])),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "mcp", "server_label": "calc", "name": "add"}, NOW],
            },
            Choice("auto", [ToolRef("add", "calc"), ToolRef("now")]),
        ),
    ],
)
def test_a_choice_names_the_tools_that_may_be_called(value: Any, choice: Choice) -> None:
    assert choice_of(fields_with([NOW, CALC], tool_choice=value)) == choice


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "function", "name": "gone"}, "tool_choice.name"),
        # A server is no function, even if the label is the same.
        ({"type": "function", "name": "calc"}, "tool_choice.name"),
        ({"type": "mcp", "server_label": "now"}, "tool_choice.server_label"),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [NOW, {"type": "function", "name": "gone"}],
            },
            "tool_choice.tools[1].name",
        ),
    ],
)
def test_a_choice_of_a_tool_that_there_is_not_is_refused(value: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        choice_of(fields_with([NOW, CALC], tool_choice=value))
    assert refused.value.field == field


def test_a_choice_without_tools_is_refused_unless_it_chooses_nothing() -> None:
    with pytest.raises(RequestError, match="requires tools") as refused:
        choice_of(fields_with([], tool_choice="required"))
    assert refused.value.field == "tool_choice"
    assert choice_of(fields_with([], tool_choice="none")) == Choice("none")


# -- models ----------------------------------------------------------------------------------------


def check_with(
    choice: Choice, card: ModelCard | None, *, strict: bool = False, has_format: bool = False
) -> None:
    request = fields_with([CALC, NOW | {"strict": strict}])
    check_calls(request, choice, card, has_format=has_format)


@pytest.mark.parametrize(
    "card",
    [
        None,
        msgspec.structs.replace(HERMES, tool_parser=None),
        msgspec.structs.replace(HERMES, takes_tools=False),
    ],
)
def test_a_model_that_was_not_trained_to_call_can_only_be_made_to(card: ModelCard | None) -> None:
    check_with(Choice("required"), card, strict=True)
    with pytest.raises(RequestError, match="was not trained to call tools") as refused:
        check_with(Choice("auto"), card)
    assert (refused.value.code, refused.value.field) == ("unsupported_parameter", "tools")


def test_strict_functions_need_a_format_of_calls_that_can_be_constrained() -> None:
    free = msgspec.structs.replace(HERMES, tool_parser="mistral", call_signs=None)
    check_with(Choice(), free)
    check_with(Choice(), HERMES, strict=True)
    check_with(Choice("required"), free, strict=True)
    with pytest.raises(RequestError, match="leave strict out") as refused:
        check_with(Choice(), free, strict=True)
    assert refused.value.field == "tools[1].strict"


def test_calls_and_a_format_of_the_answer_exclude_each_other() -> None:
    for mode in ("auto", "required"):
        with pytest.raises(RequestError) as refused:
            check_with(Choice(mode), HERMES, has_format=True)
        assert refused.value.field == "text.format"
