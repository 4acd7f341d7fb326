"""Steps of a response: the log from which any process derives the state and the next action.

The gateway writes Begun, and a cancellation as Ended. An agent writes all other steps:

    Begun → Listed* → [ Asked → Answered → (Sending → Result)* ]* → Ended → Decided*

A Begun with `asks` also counts as the first Asked.

`index` counts the steps of one log from 0 without a gap. Times are Unix seconds of the broker's
clock.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.encoding import or_none
from shared.protocol.items import Item, Label, ListedTool, ToolName
from shared.protocol.names import PART_MARK, part_id, scoped_id, split_id
from shared.protocol.records import ErrorInfo, TokenLogprobs, Usage
from shared.protocol.requests import FunctionCall, Tool

GIVEN_TURN = -1
"""Number of the turn before the first one, with the calls that come with the request: calls that a
person has approved, or the image of a model that writes no text."""


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the tools of a server that match all of these fields."""

    tool_names: Annotated[list[ToolName], Meta(max_length=1024)] | None = None
    """Names of the tools."""
    read_only: bool | None = None
    """Value of the server's hint `annotations.readOnlyHint`."""


class ApprovalFilters(Struct, frozen=True, forbid_unknown_fields=True):
    """Filters of tools by need of approval. Tools that match neither filter need it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


Approval = Literal["always", "never"] | ApprovalFilters


class ServerUse(Struct, frozen=True, omit_defaults=True):
    """MCP server that a response may use."""

    label: Label
    url: str | None = None
    """None for the configured server with this label."""
    allowed: ToolFilter | None = None
    """Tools that the request allows; None for all tools."""
    limit: ToolFilter | None = None
    """Tools that the configuration allows; None for all tools."""
    approval: Approval = "always"
    description: str | None = None


class ToolRef(Struct, frozen=True, omit_defaults=True):
    """Reference to a function, to a tool of a server, or with only a `label` to all its tools."""

    name: str | None = None
    label: str | None = None


class Choice(Struct, frozen=True, omit_defaults=True):
    """Tools that may or must be called. The other tools stay in the prompt."""

    mode: Literal["none", "auto", "required"] = "auto"
    tools: list[ToolRef] | None = None
    """The tools; None for all tools."""


class ApprovedCall(Struct, frozen=True):
    """Call that a person has approved, from the record of the response that requested it."""

    request_id: str
    """Id of the approval request."""
    label: str
    name: str
    arguments: str
    schema_digest: str
    """Digest of the tool's schema when the call was made."""


class PaintTool(Struct, frozen=True, omit_defaults=True):
    """Parameters of the tool `image_generation`, which paints images of a response."""

    model: str
    output: str
    """Name of the model's image output."""
    size: str
    partial_images: int = 0
    prompt: str | None = None
    """Prompt of the image, for a model that writes no text and so calls no tools."""
    input_images: list[str] = []
    """`media:` URLs of the images to edit, for a model that edits images. An image of an earlier
    turn of the response takes their place."""


class Begun(Struct, frozen=True, tag="begun", omit_defaults=True):
    """The request of a response, decoded and resolved by the gateway."""

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
    """Format of the model's calls, if the model has a special one."""
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
    """Time by which the response must have ended."""
    painter: PaintTool | None = None
    asks: bool = False
    """Whether the request of the first turn may be published from now on, as after an Asked."""
    trace: dict[str, str] = {}
    """Headers of the client's trace, see `shared.protocol.traces`."""


class Listed(Struct, frozen=True, tag="listed", omit_defaults=True):
    """Tools of a server, or the reason why they are unknown."""

    index: int
    label: str
    tools: list[ListedTool] = []
    error: str | None = None
    retryable: bool = False
    """Whether the server may answer for a later response."""
    inherited: bool = False
    """Whether the tools were listed by an earlier response, and are in its items."""


class Asked(Struct, frozen=True, tag="asked", omit_defaults=True):
    """A turn has begun: its request, with the id `turn_id`, may be published from now on."""

    index: int
    turn: int
    num_dropped: int = 0
    """Number of items at the beginning of the conversation that are not in the prompt."""
    withdrawn: bool = False
    """Whether the model may call no tools in this turn, because the limit on calls is reached."""


class Answered(Struct, frozen=True, tag="answered", omit_defaults=True):
    """A turn has ended without an error: the text and the calls of the model."""

    index: int
    turn: int
    content: str
    calls: list[FunctionCall]
    """Calls, with the names of tools in the prompt."""
    usage: Usage
    finish_reason: Literal["stop", "length"] = "stop"
    num_before: int = 0
    """Number of calls before the content."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []


class Sending(Struct, frozen=True, tag="sending", omit_defaults=True):
    """A call may be sent, or the request of an image published, from now on."""

    index: int
    turn: int
    call: int
    attempt: int
    key: str
    """Idempotency key, the same for all attempts."""
    arguments_digest: str
    by: str
    """Random name of the sender. Without it, two agents at one response would write equal steps,
    and the slower one would mistake the other's step for its own."""
    may_repeat: bool = False
    """Whether the call may be made again although its outcome is unknown."""


class Result(Struct, frozen=True, tag="result", omit_defaults=True):
    """Outcome of a call."""

    index: int
    turn: int
    call: int
    outcome: Literal["result", "failed", "unknown"]
    output: str | None = None
    """Output of the call; for an image, the file in base64."""
    error: dict[str, Any] | None = None
    ask: bool = False
    """Whether a person must decide on a repetition of the call."""
    fatal: bool = False
    """Whether the response ends as failed."""
    size: str | None = None
    """Width and height of an image."""


class Ended(Struct, frozen=True, tag="ended", omit_defaults=True):
    index: int
    status: Literal["completed", "incomplete", "failed", "cancelled"]
    ended_s: int
    reason: str | None = None
    """Reason why the response is incomplete."""
    error: ErrorInfo | None = None


class Decided(Struct, frozen=True, tag="decided", omit_defaults=True):
    """Decision on an approval request of this response.

    The first decision counts, unless its response could not be begun.
    """

    index: int
    approval_id: str
    approve: bool
    by: str
    """Id of the response with the decision in its input."""


Step = Begun | Listed | Asked | Answered | Sending | Result | Ended | Decided

decode_step: Callable[[bytes], Step | None]
decode_step = or_none(msgspec.json.Decoder(Step).decode)


class ResponseTask(Struct, frozen=True):
    """Message of the queue of responses."""

    response_id: str
    tenant: str


decode_response_task = msgspec.json.Decoder(ResponseTask).decode


def turn_id(tenant: str, response_id: str, turn: int) -> str:
    """Return the request id of a turn, which is the same for every agent at a response."""
    return part_id(scoped_id(response_id, tenant), f"t{turn}")


def painting_id(tenant: str, response_id: str, turn: int, call: int) -> str:
    """Return the request id of an image, which is the same for every agent at a response."""
    return part_id(scoped_id(response_id, tenant), f"i{turn - GIVEN_TURN}-{call}")


_PART = re.compile(rf"(.+){PART_MARK}(?:t\d+|i\d+-\d+)")


def response_of(request_id: str) -> str:
    """Return the response in an id of `turn_id` or `painting_id`; "" for any other id."""
    name, _ = split_id(request_id)
    match = _PART.fullmatch(name)
    return match[1] if match else ""
