"""Messages of derender: responses of generate, and the completions that they become.

The fields are those of vLLM in vLLM's order, so many of them are always null.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from shared.protocol.detokenizer import MAX_WINDOW_TOKENS
from shared.protocol.requests import ToolCall
from shared.protocol.sampling import MAX_CHOICES, TokenId
from workers.gateway.core.plan import MAX_PROMPTS
from workers.gateway.schemas.generate import TextContent, TokensContent, UsageInfo
from workers.gateway.schemas.openai_response import CallDelta, CompletionLogprobs

CONTEXT_TOKENS = 4
# The text so far is parsed again with each event.
MAX_TEXT_LEN = 2**18


class GeneratedChoice(Struct, frozen=True, kw_only=True):
    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: TokensContent | None = None


class Generated(Struct, frozen=True, kw_only=True):
    """A response of generate, or an event of its stream, in the output mode `tokens`. The text of
    the other mode ends where a stop string began, so it cannot be derendered.

    Fields that another server adds are ignored.
    """

    request_id: str
    usage: UsageInfo | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: Annotated[list[GeneratedChoice], Meta(max_length=MAX_CHOICES)]


class StreamState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a choice between two events of its stream. The client carries it."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_WINDOW_TOKENS)] = []
    """The last tokens: those whose text is out, then those that are held."""
    num_out: Annotated[int, Meta(ge=0)] = 0
    """Characters in the text of the tokens that are not held."""
    num_held: Annotated[int, Meta(ge=0)] = 0
    """Tokens at the end whose text is not out, because it ends inside a character."""
    role_sent: bool = False
    context: Annotated[list[TokenId], Meta(max_length=CONTEXT_TOKENS)] = []
    """Tokens before those whose log probabilities come next."""
    text_offset: Annotated[int, Meta(ge=0)] = 0
    """Characters that are out."""
    text: Annotated[str, Meta(max_length=MAX_TEXT_LEN)] = ""
    """All text that is out, where it may contain tool calls."""


class DerenderStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of a stream, for either API."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: Generated
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[TokenId] | None = None


class DerenderChat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stream: Literal[False] = False
    model: str | None = None
    generate_response: Generated
    prompt_tokens: int | None = None
    prompt_token_ids: list[TokenId] | None = None
    chat_request: dict[str, Any] | None = None


class DerenderChatStream(DerenderStream, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chat_request: dict[str, Any] | None = None


class DerenderCompletion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stream: Literal[False] = False
    model: str | None = None
    generate_responses: Annotated[list[Generated], Meta(max_length=MAX_PROMPTS)]
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[list[TokenId] | None] | None = None
    completion_request: dict[str, Any] | None = None


class DerenderCompletionStream(
    DerenderStream, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    completion_request: dict[str, Any] | None = None


class DerenderChatMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None


class DerenderChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: DerenderChatMessage
    logprobs: TextContent | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class DerenderChatDelta(Struct, frozen=True, kw_only=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | UnsetType = UNSET


class DerenderChatStreamChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: DerenderChatDelta
    logprobs: TextContent | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class DerenderCompletionChoice(_CompletionChoice, frozen=True, kw_only=True):
    token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class DerenderCompletionStreamChoice(_CompletionChoice, frozen=True, kw_only=True):
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


# A subclass that gives a field another type or default leaves it in its place.
class _Response(Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]


class _WholeResponse(_Response, frozen=True, kw_only=True):
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo


class _Chunk(_Response, frozen=True, kw_only=True):
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None


class DerenderChatResponse(_WholeResponse, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[DerenderChatChoice]
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class DerenderCompletionResponse(_WholeResponse, frozen=True, kw_only=True):
    object: str = "text_completion"
    choices: list[DerenderCompletionChoice]
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class DerenderChatChunk(_Chunk, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[DerenderChatStreamChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: dict[str, Any] | None = None


class DerenderCompletionChunk(_Chunk, frozen=True, kw_only=True):
    object: str = "text_completion"
    choices: list[DerenderCompletionStreamChoice]
    metrics: dict[str, Any] | None = None


class StreamAnswer(Struct, frozen=True, kw_only=True):
    chunk: DerenderChatChunk | DerenderCompletionChunk
    stream_state: StreamState
