"""Steps of a response: the log from which any process knows what was done, and what is next.

The gateway writes Begun, and a cancellation as Ended. An agent writes all else, in this order:

    Begun → Listed* → [ Asked → Answered → (Sending → Result)* ]* → Ended → Decided*

A Begun that `asks` is the first Asked as well.

`index` counts the steps of one log from 0 without a gap. Times are Unix seconds of the broker's
clock.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.encoding import or_none
from shared.protocol.items import Item, Label, ListedTool, ToolName
from shared.protocol.records import ErrorInfo, TokenLogprobs, Usage
from shared.protocol.requests import FunctionCall, Tool

GIVEN_TURN = -1
"""The number of the turn before the first one, whose calls come with the request: a person has
approved them, or a model that writes no text paints."""


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Tools of a server: those for which all that is given holds."""

    tool_names: Annotated[list[ToolName], Meta(max_length=1024)] | None = None
    """These tools alone."""
    read_only: bool | None = None
    """The server's own hint: `annotations.readOnlyHint`."""


class ApprovalFilters(Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of a tool that matches neither filter need approval."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


Approval = Literal["always", "never"] | ApprovalFilters


class ServerUse(Struct, frozen=True, omit_defaults=True):
    """An MCP server that a response may use."""

    label: Label
    url: str | None = None
    """None for a server of the configuration, which has the label as its name."""
    allowed: ToolFilter | None = None
    """None: all tools."""
    limit: ToolFilter | None = None
    """What the configuration allows."""
    approval: Approval = "always"
    description: str | None = None


class ToolRef(Struct, frozen=True, omit_defaults=True):
    """A function, a tool of a server, or with a `label` alone all tools of a server."""

    name: str | None = None
    label: str | None = None


class Choice(Struct, frozen=True, omit_defaults=True):
    """Which tools may or must be called. The others stay in the prompt."""

    mode: Literal["none", "auto", "required"] = "auto"
    tools: list[ToolRef] | None = None
    """None: all tools."""


class ApprovedCall(Struct, frozen=True):
    """A call that a person has approved, from the record of the response that asked for it."""

    request_id: str
    """Id of the approval request."""
    label: str
    name: str
    arguments: str
    schema_digest: str
    """Digest of the tool's schema when the call was made."""


class PaintTool(Struct, frozen=True, omit_defaults=True):
    """The tool `image_generation`: how the images of a response are painted."""

    model: str
    output: str
    """Name of the model's output of images."""
    size: str
    partial_images: int = 0
    prompt: str | None = None
    """What is painted for a response of a model that writes no text, and so calls nothing."""


class Begun(Struct, frozen=True, tag="begun", omit_defaults=True):
    """The request, as the gateway has understood it."""

    index: int
    created_s: int
    model: str
    tenant: str
    input: list[Item]
    echo: dict[str, Any]
    """Fields of the request that the response object repeats."""
    sampling: dict[str, Any] = {}
    instructions: str | None = None
    ancestors: list[str] = []
    """Ids of the responses that this one continues, the oldest first."""
    store: bool = True
    background: bool = False
    functions: list[Tool] = []
    servers: list[ServerUse] = []
    choice: Choice = Choice()
    parser: str | None = None
    """Format of the model's calls, if it has one of its own."""
    call_signs: list[int | None] | None = None
    shows_tools: bool = True
    """Whether the model's chat template takes tools."""
    one_call: bool = False
    max_output_tokens: int | None = None
    max_tool_calls: int = 32
    max_turns: int = 33
    truncate: bool = False
    """Drop the oldest items of a prompt that does not fit."""
    approved: list[ApprovedCall] = []
    prompt_cache_key: str | None = None
    lane: Literal["interactive", "batch"] = "interactive"
    logprobs: bool = False
    deadline_s: int | None = None
    """When the response must have ended."""
    painter: PaintTool | None = None
    asks: bool = False
    """The request of the first turn is published from now on, as if this was an Asked as well."""


class Listed(Struct, frozen=True, tag="listed", omit_defaults=True):
    """The tools of a server, or why they are not known."""

    index: int
    label: str
    tools: list[ListedTool] = []
    error: str | None = None
    retryable: bool = False
    """Whether the server may answer a later response."""
    inherited: bool = False
    """The listing is that of an earlier response, whose items have it."""


class Asked(Struct, frozen=True, tag="asked", omit_defaults=True):
    """A turn whose request is published from now on; its id is `turn_id`."""

    index: int
    turn: int
    num_dropped: int = 0
    """Items at the beginning of the conversation that the prompt leaves out."""
    withdrawn: bool = False
    """The model may call nothing in this turn, because the limit on calls is reached."""


class Answered(Struct, frozen=True, tag="answered", omit_defaults=True):
    """A turn that has ended well: what the model has written."""

    index: int
    turn: int
    content: str
    calls: list[FunctionCall]
    """Calls by their names in the prompt."""
    usage: Usage
    finish_reason: Literal["stop", "length"] = "stop"
    num_before: int = 0
    """Number of the calls that come before the content."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []


class Sending(Struct, frozen=True, tag="sending", omit_defaults=True):
    """A call whose first byte may leave from now on, or an image whose request is published."""

    index: int
    turn: int
    call: int
    attempt: int
    key: str
    """Idempotency key, the same for all attempts."""
    arguments_digest: str
    by: str
    """A random name of the one who sends. Two agents at one response would else write equal steps,
    and the slower one would take the other's for its own."""
    may_repeat: bool = False
    """Whether the call may be made again without knowing what became of it."""


class Result(Struct, frozen=True, tag="result", omit_defaults=True):
    """What became of a call."""

    index: int
    turn: int
    call: int
    outcome: Literal["result", "failed", "unknown"]
    output: str | None = None
    """For an image, the file in base64."""
    error: dict[str, Any] | None = None
    ask: bool = False
    """A person is asked whether the call is to be repeated."""
    fatal: bool = False
    """The response ends as failed."""


class Ended(Struct, frozen=True, tag="ended", omit_defaults=True):
    index: int
    status: Literal["completed", "incomplete", "failed", "cancelled"]
    ended_s: int
    reason: str | None = None
    """Why the response is incomplete."""
    error: ErrorInfo | None = None


class Decided(Struct, frozen=True, tag="decided", omit_defaults=True):
    """A decision on an approval request of this response.

    The first one counts, unless the response that it was made for could not be begun.
    """

    index: int
    approval_id: str
    approve: bool
    by: str
    """Id of the response whose input has the decision."""


Step = Begun | Listed | Asked | Answered | Sending | Result | Ended | Decided

decode_step: Callable[[bytes], Step | None]
decode_step = or_none(msgspec.json.Decoder(Step).decode)


class ResponseTask(Struct, frozen=True):
    """A message of the queue of responses."""

    response_id: str
    tenant: str


decode_response_task = msgspec.json.Decoder(ResponseTask).decode


def turn_id(response_id: str, turn: int) -> str:
    """Return the request id of a turn. Whoever goes on with a response publishes the same one."""
    return f"{response_id}-t{turn}"


def painting_id(response_id: str, turn: int, call: int) -> str:
    """Return the request id of an image, which is the same for whoever goes on, too."""
    return f"{response_id}-i{turn - GIVEN_TURN}-{call}"
