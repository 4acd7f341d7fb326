"""Request and response bodies of OpenAI's Responses API, and events of its streams. Pure.

As in the other APIs, an unknown field is refused by its name, and a field that is not implemented
is refused as unsupported.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.helpers import patterns
from shared.protocol.encoding import JsonObject
from shared.protocol.items import Item, Label, OutputItem, ToolName
from shared.protocol.multimodal import AUDIO
from shared.protocol.sampling import NumLogprobs, Probability
from shared.protocol.steps import Approval, ToolFilter
from workers.gateway.schemas.openai_request import JsonObjectFormat, Positive, TextFormat

RESPONSE_UNSUPPORTED = frozenset(
    {
        "conversation", "prompt", "moderation", "context_management", "background_options",
        "access_programs", "prompt_cache_options", "stream_options", "service_tier",
        "reasoning", "text", "include", "prompt_cache_retention",
        # Fields of chat completions. Responses have no sound in OpenAI's API either.
        "modalities", AUDIO,
    }
)  # fmt: skip

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Include = Literal["message.output_text.logprobs", "message.input_image.image_url"]


class SchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    name: Annotated[str, Meta(pattern=patterns.NAME)]
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of reasoning. Pagemill has no reasoning parser, so only its absence is accepted."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    name: Annotated[str, Meta(pattern=patterns.NAME)]
    parameters: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class McpTool(Struct, frozen=True, forbid_unknown_fields=True, tag="mcp"):
    """An MCP server: one of the configuration by its label, or any other by its URL."""

    server_label: Label
    server_url: str | None = None
    allowed_tools: list[ToolName] | ToolFilter | None = None
    """Names of tools, or a filter. None and `["*"]` allow all tools."""
    require_approval: Approval | None = None
    server_description: Annotated[str, Meta(max_length=1024)] | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    connector_id: None = None
    tunnel_id: None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: None = None


class ImageTool(Struct, frozen=True, forbid_unknown_fields=True, tag="image_generation"):
    """Tool that paints images."""

    model: str | None = None
    """Model that paints; by default the model of the response."""
    size: str | None = None
    """One of the painting model's sizes; by default, and for `auto`, its default size, or of an
    edited image about the aspect ratio of the last image to edit."""
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    """Previews in a stream, at equal distances; by default none."""
    action: Literal["auto", "generate", "edit"] | None = None
    """`edit` requires a model that edits images, and `generate` one that paints without an image;
    by default, and for `auto`, the model does what it can."""

    # Other values of these fields would have an effect that is not implemented.
    background: Literal["auto", "opaque"] | None = None
    complexity: None = None
    frame_count: None = None
    frame_duration_ms: None = None
    input_fidelity: None = None
    input_image_mask: None = None
    moderation: Literal["auto", "low"] | None = None
    output_compression: Literal[100] | None = None
    output_format: Literal["png"] | None = None
    quality: Literal["auto"] | None = None
    svg: None = None


class FunctionChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    name: str


class McpChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="mcp"):
    server_label: Label
    name: ToolName | None = None


class ImageChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="image_generation"):
    pass


NamedChoice = FunctionChoice | McpChoice | ImageChoice


class AllowedChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """Only these tools can be called. The others stay in the prompt."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Meta(min_length=1, max_length=128)]


ResponseTool = FunctionTool | McpTool | ImageTool
ResponseToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class ResponseFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Request fields that determine the prompt."""

    model: str
    input: Any = None
    """Text, or a list of items."""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: None = None


class ResponseRequest(ResponseFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[Include], Meta(max_length=8)] | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_logprobs: NumLogprobs | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None

    service_tier: Literal["auto", "default", "flex"] | None = None
    """`flex`: the turns are queued in the batch lane, after interactive requests."""

    # These fields have no effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    # Other values of these fields would have an effect that is not implemented.
    prompt: None = None
    moderation: None = None
    context_management: None = None
    background_options: None = None
    prompt_cache_options: None = None
    access_programs: None = None


# -- answers ---------------------------------------------------------------------------------------


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseBody(Struct, frozen=True, kw_only=True):
    """A response, with the fields of its request."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: JsonObject = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: JsonObject = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None
    object: str = "response"


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True):
    """A page of items."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class ResponseEvent(Struct, frozen=True, omit_defaults=True):
    """An event of a stream. Its type determines which fields it has."""

    type: str
    sequence_number: int
    response: ResponseBody | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: Any = None
    part: Any = None
    delta: str | None = None
    partial_image_b64: str | None = None
    partial_image_index: int | None = None
    text: str | None = None
    name: ToolName | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
