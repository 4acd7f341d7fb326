"""Chat completions: the plan of a request. Pure."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import (
    AudioPart,
    AudioURL,
    ContentPart,
    GenerateRequest,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from shared.tool_calls.grammars import (
    COMPACT,
    arguments_schema,
    calls_schema,
    required_grammar,
    strict_grammar,
)
from workers.gateway.core.assembler import OutputOptions
from workers.gateway.core.plan import (
    STRUCTURE_FIELD,
    SubmitPlan,
    UsageOptions,
    client_fields_of,
    generate_request,
    plan_of,
    sampling_of,
    structure_of,
    usage_options,
)
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.openai_request import (
    ChatAudioPart,
    ChatDocumentPart,
    ChatInputAudioPart,
    ChatMessage,
    ChatPart,
    ChatRefusalPart,
    ChatRequest,
    ChatTextPart,
    ChatVideoPart,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    ProcessorKwargs,
)

MAX_NAMED_FILES = 100


class AudioOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of a spoken answer."""

    stored_s: int
    """Time for which the speech is stored."""
    timed: bool = False
    """Whether samples have the position of the text that they speak, see OutputSpec."""


class ChatOptions(UsageOptions, frozen=True, kw_only=True):
    logprobs: bool = False
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    form: str | UnsetType = UNSET
    names: list[str] | UnsetType = UNSET
    one_call: bool | UnsetType = UNSET
    speech: AudioOptions | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET

    @property
    def output(self) -> AudioOptions | None:
        return self.speech or None


class ToolPlan(Struct, frozen=True):
    """Format of the tool calls of an answer: the model's own, or one that it is constrained to."""

    form: str | None = None
    """Format of `shared.tool_calls.parser.Form`. None: the answer has no calls."""
    names: list[str] = []
    """Functions that may be called."""
    one_call: bool = False
    structure: Mapping[str, object] | None = None
    """Constraint on the answer, as a StructuredOutputs mapping."""


def plan_chat(
    request: ChatRequest, card: ModelCard | None = None, *, strict: bool = True
) -> SubmitPlan[ChatOptions]:
    """Return the plan of a request. `card` is needed for a request with tools.

    `strict` is False if another server may answer the request. Servers differ in the grammars that
    they read, so optional calls are then not constrained, and required calls are a JSON list.

    Raises a RequestError naming the field.
    """
    tools = tool_plan(request, card, own_form=strict)
    structure = tools.structure
    if strict and tools.form is not None and structure is None and card is not None:
        structure = strict_structure(request, card)
    sampling = sampling_of(request) | _logprobs_of(request)
    fields = client_fields_of(request) | _file_fields(request.messages)
    limit = request.max_completion_tokens
    if limit is not None:
        if sampling.get("max_tokens", limit) != limit:
            raise InvalidRequest(
                "max_completion_tokens: max_tokens has a different value; send one of them",
                field="max_completion_tokens",
            )
        sampling["max_tokens"] = limit
        fields["sampling_params.max_tokens"] = "max_completion_tokens"
    if structure is not None:
        sampling["structured_outputs"] = structure
        fields[STRUCTURE_FIELD] = "tools"
    if tools.form not in (None, "named", "required"):
        # The tags around calls may be special tokens.
        sampling["skip_special_tokens"] = False
    options = ChatOptions(**usage_options(request), logprobs=bool(request.logprobs), fields=fields)
    if tools.form is not None:
        options = replace(options, form=tools.form, names=tools.names, one_call=tools.one_call)
    return plan_of(request, [_generate(request, card)], sampling, options)


def _generate(request: ChatRequest, card: ModelCard | None) -> GenerateRequest:
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "add_generation_prompt", "continue_final_message"):
        value = getattr(request, name)
        if value is not None:
            kwargs[name] = value
    shows_tools = request.tool_choice != "none" and (card is None or card.takes_tools)
    return generate_request(
        request,
        messages=messages_of(request.messages, request.mm_processor_kwargs),
        tools=[Tool(tool.function) for tool in request.tools or []] if shows_tools else [],
        template_kwargs=kwargs,
    )


def messages_of(
    messages: Sequence[ChatMessage], options: ProcessorKwargs | None = None
) -> list[Message]:
    """Return the messages for the bus. Raises InvalidRequest for a message without content."""
    use_audio = options is not None and bool(options.use_audio_in_video)
    return [_message_of(message, f"messages[{i}]", use_audio) for i, message in enumerate(messages)]


def _message_of(message: ChatMessage, field: str, use_audio: bool) -> Message:
    content = message.refusal if message.content is None else message.content
    if content is None and message.audio is not None:
        content = message.audio.transcript
    if content is None and not message.tool_calls:
        raise InvalidRequest("a message needs content", field=f"{field}.content")
    parts = (
        [_part_of(p, f"{field}.content[{j}]", use_audio) for j, p in enumerate(content)]
        if isinstance(content, list)
        else content
    )
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=parts,
        tool_calls=[ToolCall(call.id, call.function) for call in message.tool_calls or []],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _file_fields(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """Return the client's field of each sound in base64 and each document, by its field on the bus.

    The names are stored with the request, so their number is limited. Models accept fewer files.
    """
    names: dict[type, tuple[str, str]] = {
        ChatInputAudioPart: ("audio_url", "input_audio.data"),
        ChatDocumentPart: ("document_url", "file"),
    }
    fields = (
        (f"messages[{i}].content[{j}]", *names[type(part)])
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if type(part) in names
    )
    return {
        f"{field}.{on_bus}": f"{field}.{of_client}"
        for field, on_bus, of_client in itertools.islice(fields, MAX_NAMED_FILES)
    }


def _part_of(part: ChatPart, field: str, use_audio: bool) -> ContentPart:
    match part:
        case ChatTextPart(text=text) | ChatRefusalPart(refusal=text):
            return TextPart(text)
        case ChatInputAudioPart(input_audio=sound):
            return AudioPart(AudioURL(sound.url, sound.overflow))
        case ChatAudioPart():
            return AudioPart(part.audio_url)
        case ChatVideoPart():
            video = part.video_url
            return VideoPart(replace(video, use_audio=video.use_audio or use_audio))
        case ChatDocumentPart(file=file):
            if not file.has_one_file:
                raise InvalidRequest(
                    "a file needs one of file_data, file_id and file_url", field=f"{field}.file"
                )
            return file.document
        case _:
            return ImagePart(part.image_url)


def _logprobs_of(request: ChatRequest) -> dict[str, int]:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs require logprobs", field="top_logprobs")
    return {"logprobs": request.top_logprobs or 0} if request.logprobs else {}


def tool_plan(request: ChatRequest, card: ModelCard | None, *, own_form: bool) -> ToolPlan:
    """Return the plan for tool calls. Raises a RequestError if calls could not be recognized.

    With `own_form`, required calls have the model's own form if a grammar can enforce it.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools and choice not in (None, "none"):
        raise InvalidRequest("tool_choice requires tools", field="tool_choice")
    if not tools or choice == "none":
        return ToolPlan()
    one_call = request.parallel_tool_calls is False
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(f"there is no tool {name!r}", field="tool_choice.function.name")
        schema = arguments_schema(tools[names.index(name)]) | COMPACT
        return ToolPlan("named", [name], True, {"json_schema": schema})
    if choice == "required" and own_form and card is not None and card.call_signs is not None:
        grammar = required_grammar(tools, card.call_signs, one_call=one_call)
        return ToolPlan(card.tool_parser, names, one_call, {"grammar": grammar})
    if choice == "required":
        schema = calls_schema(tools, one_call=one_call)
        return ToolPlan("required", names, one_call, {"json_schema": schema})
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        raise UnsupportedParameter(
            "response_format is not supported for an answer that may call tools",
            field="response_format",
        )
    if card is None or not card.takes_tools or card.tool_parser is None:
        raise UnsupportedParameter(
            f"tools: {request.model} was not trained to call tools: set tool_choice to 'required'"
            " or to a function, which constrains the answer to the form of a call",
            field="tools",
        )
    return ToolPlan(card.tool_parser, names, one_call)


def strict_structure(request: ChatRequest, card: ModelCard) -> Mapping[str, object] | None:
    """Return the constraint on an answer that may call a strict function, else None.

    Raises a RequestError if the calls cannot be constrained.
    """
    tools = request.tools or []
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    if card.call_signs is None:
        raise UnsupportedParameter(
            f"{request.model} writes calls in a format that cannot be constrained while calls are"
            " optional: leave strict out, or set tool_choice to 'required' or to a function",
            field=f"tools[{strict}].function.strict",
        )
    if (other := structure_of(request)) is not None:
        raise InvalidRequest(f"{other[0]} cannot be combined with strict functions", field=other[0])
    return {"grammar": strict_grammar(tools, card.call_signs)}
