"""Response bodies of OpenAI's API: whole answers, and the chunks of streamed ones. Pure."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from shared.protocol.records import Usage
from shared.protocol.requests import ToolCall


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    audio_tokens: int
    """Codec frames of the speech."""
    text_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    """Tokens of the text, and codec frames of the speech."""
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Set if the answer is spoken."""


def usage_of(parts: list[Usage], audio_tokens: int | None = None) -> UsageBody:
    """Return the usage of all prompts together. `audio_tokens` is None without a speech."""
    prompt = sum(part.prompt_tokens for part in parts)
    text = sum(part.completion_tokens for part in parts)
    cached = CachedTokens(sum(part.cached_tokens for part in parts))
    if audio_tokens is None:
        return UsageBody(prompt, text, prompt + text, cached)
    total = prompt + text + audio_tokens
    details = CompletionDetails(audio_tokens, text)
    return UsageBody(prompt, text + audio_tokens, total, cached, details)


FinishReason = Literal["stop", "length", "tool_calls"]
MaybeUsage = UsageBody | UnsetType | None


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionDelta(Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class SpeechError(Struct, frozen=True):
    """Reason why a speech was cut."""

    code: str
    message: str
    param: str | None


class AudioDelta(Struct, frozen=True):
    """A piece of a speech."""

    id: str
    data: str | UnsetType = UNSET
    """Base64 of 16-bit samples, least significant byte first."""
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    """Set in the last piece."""
    error: SpeechError | UnsetType = UNSET
    """Set in the last piece of a speech that was cut."""


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    audio: AudioDelta | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET


class AnswerHead(Struct, frozen=True):
    """First fields of every answer and every chunk."""

    id: str
    created: int
    model: str


class ChatChunk(AnswerHead, frozen=True):
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: MaybeUsage = UNSET


class AnswerAudio(Struct, frozen=True):
    """A whole speech."""

    id: str
    data: str
    """Base64 of the sound, in the requested format."""
    transcript: str
    expires_at: int
    """Unix seconds until which the speech is stored."""
    error: SpeechError | UnsetType = UNSET
    """Set if the speech was cut. `data` has the sound up to that point."""


class AnswerMessage(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET


class ChatCompletion(AnswerHead, frozen=True):
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class CompletionLogprobs(Struct, frozen=True):
    """Log probabilities as lists, which have an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, more: "CompletionLogprobs") -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(more, name))


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET


class Completion(AnswerHead, frozen=True):
    """A whole completion, or a chunk of a streamed one."""

    choices: list[CompletionChoice]
    usage: MaybeUsage = UNSET
    object: str = "text_completion"
