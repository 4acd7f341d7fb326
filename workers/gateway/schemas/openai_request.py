"""Request bodies of OpenAI's chat completions and completions, with the extra fields of vLLM. Pure.

An unknown field is refused by its name. A field of other servers that is not implemented here is
refused as unsupported, except for values without an effect: the type of such a field allows only
these values. `null` means the same as a missing field.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.helpers import patterns
from shared.protocol.encoding import JsonObject
from shared.protocol.items import InputAudio, InputFile
from shared.protocol.requests import AudioURL, FunctionCall, ImageURL, OnLate, Tool, VideoURL
from shared.protocol.sampling import NumLogprobs, StopString, StopStrings, TokenId
from workers.gateway.schemas.generate import GenerateStreamOptions
from workers.gateway.schemas.sampling_fields import SamplingFields

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

UNSUPPORTED = frozenset(
    {
        "prediction", "web_search_options", "verbosity", "functions",
        "function_call", "reasoning_effort", "documents", "chat_template", "echo",
        "mm_processor_kwargs", "media_io_kwargs", "prompt_logprobs", "best_of", "suffix",
        "use_beam_search", "length_penalty", "truncate_prompt_tokens", "prompt_embeds",
        "spaces_between_special_tokens", "return_token_ids", "kv_transfer_params", "vllm_xargs",
        "logits_processors", "return_tokens_as_token_ids", "include_reasoning", "tool_stream",
        "thinking_token_budget", "stream_options.include_obfuscation", "detokenize",
        "guided_decoding_backend", "guided_whitespace_pattern",
        "repetition_detection", "logprob_token_ids", "background",
    }
)  # fmt: skip


class StreamOptions(GenerateStreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class StructuredOutputsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Constraint on the text of an answer: exactly one of these fields."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class CommonRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat completions and completions have in common."""

    stream_options: StreamOptions | None = None

    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 keep all tokens."""

    response_format: "ResponseFormat | None" = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None
    """For a model with slots, requests with the same key are queued in the same slot."""
    priority: Int64 | None = None
    """Above 0: queued in the batch lane, after interactive requests."""
    service_tier: str | None = None
    """`flex`: queued in the batch lane, as with a `priority` above 0. Other values have no effect.
    """
    adapter: str | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the last token: by default `delivery.default_timeout_s`, at most
    `delivery.max_timeout_s`."""
    durable: bool | None = None
    """Continue the request when the connection closes."""

    # These fields have no effect.
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    # Other values of these fields would have an effect that is not implemented.
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    kv_transfer_params: None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    pass


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=patterns.NAME)]
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


# -- chat -----------------------------------------------------------------------------------------


CacheControl = JsonObject | None
"""Anthropic's mark of a prefix to cache. It has no effect: every prefix is cached."""


class ChatTextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str
    cache_control: CacheControl = None


class ChatRefusalPart(Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    refusal: str


class ChatImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    image_url: ImageURL
    cache_control: CacheControl = None


class ChatInputAudioPart(Struct, frozen=True, forbid_unknown_fields=True, tag="input_audio"):
    input_audio: InputAudio
    cache_control: CacheControl = None


class ChatAudioPart(Struct, frozen=True, forbid_unknown_fields=True, tag="audio_url"):
    audio_url: AudioURL


class ChatVideoPart(Struct, frozen=True, forbid_unknown_fields=True, tag="video_url"):
    video_url: VideoURL


class ChatDocumentPart(Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    file: InputFile
    cache_control: CacheControl = None


ChatFilePart = ChatImagePart | ChatInputAudioPart | ChatAudioPart | ChatVideoPart | ChatDocumentPart
ChatPart = ChatTextPart | ChatRefusalPart | ChatFilePart


class ChatToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessageAudio(Struct, frozen=True, forbid_unknown_fields=True):
    """A speech of this server. Its transcript is used if the message has no content."""

    id: str
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation. An answer of this server may be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: ChatMessageAudio | None = None
    function_call: None = None

    # These fields have no effect.
    reasoning: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl = None


class ChatTool(Tool, frozen=True, forbid_unknown_fields=True):
    cache_control: CacheControl = None
    """No effect."""


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatAudio(Struct, frozen=True, forbid_unknown_fields=True):
    """Format and voice of a spoken answer."""

    format: str
    """`pcm16`, or `wav` if the answer is not streamed."""
    voice: str


class ProcessorKwargs(Struct, frozen=True, forbid_unknown_fields=True):
    """Options for all media of a request, under vLLM's name."""

    use_audio_in_video: bool | None = None
    """Whether the model hears the sound of each video, like `use_audio` in each `video_url`."""


class ChatRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """With false, an answer has at most one call."""
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    modalities: list[Literal["text", "audio", "image"]] | None = None
    """`["text"]`, or `["text", "audio"]` to have the answer spoken as well. `image` is refused:
    images are painted by `/v1/images/generations`."""
    audio: ChatAudio | None = None
    on_late: OnLate | None = None
    """`text`: if the speech fails or is late, end with the text, provided that it is complete."""
    functions: None = None
    function_call: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Literal["none"] | None = None
    documents: None = None
    chat_template: None = None
    echo: Literal[False] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: None = None


# -- completions ----------------------------------------------------------------------------------

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: Any
    """Text, token ids, or a list of up to 64 of either."""
    max_tokens: Count | None = None
    """0 is allowed with `echo`: then the answer is the prompt alone."""
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    """Number of most probable tokens to return."""
    best_of: Literal[1] | None = None
    suffix: None = None
