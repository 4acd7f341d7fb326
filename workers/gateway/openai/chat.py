"""Chat completions: what goes on the bus for a request. Pure."""

from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest
from shared.protocol.messages import (
    ContentPart,
    GenerateRequest,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from shared.protocol.renderer_rpc import ModelCard
from workers.gateway.core.plan import (
    STRUCTURE_FIELD,
    SubmitPlan,
    client_fields_of,
    lane_of,
    sampling_of,
    usage_options,
)
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.strict_tools import strict_structure
from workers.gateway.schemas.openai_request import (
    ChatMessage,
    ChatPart,
    ChatRefusalPart,
    ChatRequest,
    ChatTextPart,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
)


class ToolPlan(Struct, frozen=True):
    """How calls are found in an answer: in the model's own form, or in one that it is held to."""

    form: str | None = None
    """Of `tools.FORMS`; None: there are none in it."""
    names: list[str] = []
    """Of the functions that may be called."""
    one: bool = False
    structure: dict[str, Any] | None = None


def needs_card(request: ChatRequest) -> bool:
    return bool(request.tools)


def plan_chat(
    request: ChatRequest, card: ModelCard | None = None, *, strict: bool = True
) -> SubmitPlan:
    """`card` is needed for a request with tools. Without `strict`, functions that are it and need
    not be called are taken as others. Raises a RequestError with the field."""
    plan = tool_plan(request, card)
    structure = plan.structure
    by_itself = plan.form is not None and structure is None
    if strict and by_itself and card is not None:
        structure = strict_structure(request, card)
    sampling, fields = sampling_of(request) | _logprobs_of(request), client_fields_of(request)
    limit = request.max_completion_tokens
    if limit is not None:
        if sampling.get("max_tokens", limit) != limit:
            raise InvalidRequest("max_tokens differs from this", field="max_completion_tokens")
        sampling["max_tokens"] = limit
        fields["sampling_params.max_tokens"] = "max_completion_tokens"
    if structure is not None:
        sampling["structured_outputs"] = structure
        fields[STRUCTURE_FIELD] = "tools"
    if by_itself:
        # The signs by which calls are found may be special tokens.
        sampling["skip_special_tokens"] = False
    options = usage_options(request) | {"logprobs": bool(request.logprobs), "fields": fields}
    if plan.form is not None:
        options |= {"form": plan.form, "names": plan.names, "one_call": plan.one}
    return SubmitPlan([_generate(request, card)], sampling, options)


def _generate(request: ChatRequest, card: ModelCard | None) -> GenerateRequest:
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        value = getattr(request, name)
        if value is not None:
            kwargs[name] = value
    shown = request.tools or []
    if request.tool_choice == "none" or (card is not None and not card.takes_tools):
        shown = []
    return GenerateRequest(
        model=request.model,
        messages=[message_of(given, f"messages[{i}]") for i, given in enumerate(request.messages)],
        tools=shown,
        template_kwargs=kwargs,
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt,
        lane=lane_of(request),
        timeout_s=request.timeout_s,
        adapter=request.adapter,
    )


def message_of(given: ChatMessage, field: str) -> Message:
    content = given.content
    if isinstance(content, list):
        parts = [_part_of(part) for part in content]
        return _message(given, parts)
    if content is None and given.refusal is not None:
        return _message(given, given.refusal)
    if content is None and not given.tool_calls:
        raise InvalidRequest("a message needs content", field=f"{field}.content")
    return _message(given, content)


def _message(given: ChatMessage, content: str | list[ContentPart] | None) -> Message:
    return Message(
        role="system" if given.role == "developer" else given.role,
        content=content,
        tool_calls=[ToolCall(call.id, call.function) for call in given.tool_calls or []],
        tool_call_id=given.tool_call_id,
        name=given.name,
    )


def _part_of(given: ChatPart) -> ContentPart:
    match given:
        case ChatTextPart(text=text) | ChatRefusalPart(refusal=text):
            return TextPart(text)
        case _:
            return ImagePart(given.image_url)


def _logprobs_of(request: ChatRequest) -> dict[str, int]:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs go with logprobs alone", field="top_logprobs")
    return {"logprobs": request.top_logprobs or 0} if request.logprobs else {}


def tool_plan(request: ChatRequest, card: ModelCard | None) -> ToolPlan:
    """Raises a RequestError where the model's calls could not be found."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("there are no tools to choose from", field="tool_choice")
        return ToolPlan()
    one = request.parallel_tool_calls is False
    names = [tool.function.name for tool in tools]
    if choice == "none":
        return ToolPlan()
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise InvalidRequest(f"there is no tool {wanted!r}", field="tool_choice.function.name")
        chosen = tools[names.index(wanted)]
        return ToolPlan(
            "named", [wanted], True, {"json_schema": _arguments_schema(chosen) | COMPACT}
        )
    if choice == "required":
        return ToolPlan("required", names, one, {"json_schema": _calls_schema(tools, one)})
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        raise UnsupportedParameter(
            "response_format: an answer that may call tools has no structure of its own here",
            field="response_format",
        )
    if card is None or not card.takes_tools or card.tool_parser is None:
        raise UnsupportedParameter(
            f"tools: {request.model} has not been taught to call them; with tool_choice 'required'"
            " or a named tool its answer is held to the form of a call",
            field="tools",
        )
    return ToolPlan(card.tool_parser, names, one)


# To llguidance: arguments are read by programs, and a model that is made to write JSON and does not
# want to would go on with spaces for ever.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _calls_schema(tools: list[Tool], one: bool) -> dict[str, Any]:
    """A list of calls; schemas that functions define for themselves stay within reach of `$ref`."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        arguments = dict(_arguments_schema(tool))
        definitions |= arguments.pop("$defs", {})
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": arguments,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one:
        schema["maxItems"] = 1
    return schema | COMPACT | ({"$defs": definitions} if definitions else {})
