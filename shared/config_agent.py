"""The part of the configuration about agents, which carry out responses."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.config_stages import Positive
from shared.protocol.steps import ToolFilter

Seconds = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class McpServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An MCP server that requests name by its label. Its tokens are never on the bus."""

    url: str
    """URL of its streamable HTTP transport, such as `https://tools.example/mcp`."""
    headers_env: dict[str, str] = {}
    """Environment variables of the agent with the values of request headers, by header name."""
    allowed_tools: ToolFilter | None = None
    """The only tools that may be used; by default all. A request may allow fewer."""
    require_approval: Literal["always", "never"] | None = None
    """`always`: no request can waive approval. `never`: calls need none unless a request wants it.
    By default the request decides, and without its decision calls need approval."""
    trust_annotations: bool = False
    """Make a call again whose outcome is unknown if the tool calls itself read-only or
    idempotent."""
    idempotency: Literal["none", "header"] = "none"
    """`header`: the server knows repeated calls by the header `Idempotency-Key`, so they are made
    again when their outcome is unknown."""


class AgentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Responses: how long they are stored, and their limits."""

    ttl_s: Annotated[float, Meta(gt=0)] = 2_592_000.0
    """Time for which a response is stored, from its last step."""
    store_mib: Positive = 512
    """Limit on all stored responses together. Further responses are refused; none is dropped."""
    max_stored: Positive = 100_000
    """Limit on the stored responses of one tenant, also of those that are stored for an hour only
    (`store: false`). Further ones are refused."""
    max_stored_mib: Positive = 256
    """Limit on the bytes of these. Further ones are refused."""
    max_conversation_mib: Positive = 16
    """Limit on the stored responses that one response continues."""
    timeout_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """Time in which a response must end. Where a client waits, an agent must begin it within
    `delivery.default_timeout_s`."""
    max_turns: Positive = 33
    """Limit on the turns of one response."""
    max_tool_calls: Annotated[int, Meta(ge=0)] = 32
    """Limit on the calls of MCP tools of one response; a request may set a lower one."""
    max_parallel_calls: Positive = 8
    """Limit on the calls of one turn that are made at the same time."""
    concurrency: Positive = 256
    """Limit on responses in flight in one agent."""
    servers: dict[Name, McpServerConfig] = {}
    """MCP servers by label."""
    mcp_hosts: list[str] = []
    """Hosts of MCP servers that a request may name by URL; `*` matches any part of a name. None by
    default. Addresses outside the public internet are refused even so."""
    mcp_networks: list[str] = []
    """Private networks that are exempt from that refusal, such as `127.0.0.0/8`; a server without
    TLS must be in one of them."""
    unknown: Literal["tell", "approve", "fail"] = "tell"
    """When nobody knows whether a call was carried out: tell the model, ask for approval to make it
    again, or end the response as failed."""
    call_timeout_s: Seconds = 60.0
    """Time for one call of a tool, or for listing the tools of a server, with all attempts at it
    and the opening of a session."""
    max_servers: Positive = 8
    """Limit on the MCP servers of one request."""
    max_output_kib: Positive = 64
    """Limit on the result of a call that the model is told. The rest is left out, with a note."""
    max_answer_mib: Positive = 4
    """Limit on one answer of an MCP server."""
