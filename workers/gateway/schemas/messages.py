"""Request and response bodies of Anthropic's Messages API, and events of its streams. Pure.

As in the other APIs, an unknown field is refused by its name, and `null` means the same as a
missing field. Fields of the hosted service that have no effect here are accepted.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.helpers import patterns
from shared.protocol.encoding import JsonObject
from shared.protocol.items import FileId
from shared.protocol.multimodal import IMAGE, MEDIA_SCHEME
from shared.protocol.sampling import Probability, StopStrings
from workers.gateway.schemas.openai_request import Int64, Positive

MESSAGES_UNSUPPORTED = frozenset(
    {
        "container", "mcp_servers", "speed", "thread", "compaction", "fallbacks",
        "fallback_credit_token", "output_format",
    }
)  # fmt: skip


class Base64Source(Struct, frozen=True, forbid_unknown_fields=True, tag="base64"):
    data: str
    media_type: str
    """No effect: the format is detected from the file."""

    @property
    def url(self) -> str:
        return f"data:;base64,{self.data}"


class UrlSource(Struct, frozen=True, forbid_unknown_fields=True, tag="url"):
    url: str
    """URL of the file, as in `image_url`."""


class FileSource(Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    file_id: FileId
    """Id of a stored file."""

    @property
    def url(self) -> str:
        return f"{MEDIA_SCHEME}{self.file_id}"


class TextSource(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class Block(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cache_control: JsonObject | None = None
    """No effect: prompts with the same beginning share it in the cache anyway."""


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: list[Any] | None = None
    """No effect."""


class ImageBlock(Block, frozen=True, kw_only=True, tag=IMAGE):
    source: Base64Source | UrlSource | FileSource


class Citations(Struct, frozen=True, forbid_unknown_fields=True):
    enabled: Literal[False] | None = None


class ContentSource(Struct, frozen=True, forbid_unknown_fields=True, tag="content"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(Block, frozen=True, kw_only=True, tag="document"):
    """PDF document, or text. The model reads its title and its context before it."""

    source: Base64Source | UrlSource | FileSource | TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(Block, frozen=True, kw_only=True, tag="search_result"):
    title: str
    source: str
    content: list[TextBlock]
    citations: Citations | None = None


class ToolReferenceBlock(Block, frozen=True, kw_only=True, tag="tool_reference"):
    tool_name: str


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, tag="thinking"):
    """Thoughts of an earlier answer. The model does not get them."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    Struct, frozen=True, forbid_unknown_fields=True, tag="redacted_thinking"
):
    data: str


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: JsonObject
    caller: JsonObject | None = None
    """No effect."""
    toolset_name: None = None


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    """With true, the result begins with a line that says so."""
    toolset_name: None = None


ContentBlock = ResultBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class MessagesTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function that the client runs. Tools that Anthropic runs or defines are refused."""

    name: Annotated[str, Meta(pattern=patterns.NAME)]
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: JsonObject | None = None
    """No effect."""
    eager_input_streaming: bool | None = None
    """No effect: arguments are streamed as the model writes them."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AutoChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, frozen=True, forbid_unknown_fields=True, tag="none"):
    pass


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    schema: JsonObject
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: str | None = None
    """No effect."""


class MessagesMetadata(Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None
    """No effect."""


class CountTokensRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that determine the prompt."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=1024)]
    """If the last one is of the assistant, the answer continues it."""
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: JsonObject | None = None
    """Variables of the model's chat template."""

    # These fields have no effect.
    thinking: JsonObject | None = None
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None
    speed: Literal["standard"] | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    # These fields have the same meaning as in chat completions.
    adapter: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    durable: bool | None = None
    priority: Int64 | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None

    # These fields have no effect.
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: JsonObject | None = None
    container: None = None


# -- answers --------------------------------------------------------------------------------------


class AnswerText(Struct, frozen=True, tag="text"):
    text: str


class AnswerToolUse(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: Raw
    """Arguments, which are empty if the model wrote no complete JSON object. The events of a stream
    have the text of the model."""


AnswerBlock = AnswerText | AnswerToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct, frozen=True):
    input_tokens: int
    """Tokens of the prompt, without the cached ones."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct, frozen=True, tag="message", kw_only=True):
    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: MessageAnswer


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | InputDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True):
    input_tokens: int


class MessageError(Struct, frozen=True):
    type: str
    message: str
    code: str
    param: str | None


class MessageErrorAnswer(Struct, frozen=True, tag="error"):
    error: MessageError


class ModelInfo(Struct, frozen=True, tag="model"):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | UnsetType = UNSET
    """The configured limit. The model's own limit is not known here."""
    lifecycle: str = "active"


class ModelInfoList(Struct, frozen=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
