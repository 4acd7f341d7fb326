"""Responses API: the first step of a response, from its request. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from shared.config.schema import AgentConfig
from shared.errors import InvalidRequest, NotFound
from shared.helpers.closed_schemas import closed
from shared.protocol.items import (
    FunctionCallItem,
    FunctionOutputItem,
    ImageCallItem,
    InputFilePart,
    InputImagePart,
    Item,
    McpCallItem,
    MessageItem,
    MessagePart,
    item_id,
)
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.steps import ApprovedCall, Begun, PaintTool
from workers.gateway.core.assembler import PROMPT_FIELDS
from workers.gateway.core.field_names import ClientFields
from workers.gateway.http.body_types import converted
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.response_tools import check_calls, choice_of, functions_of, servers_of
from workers.gateway.schemas.openai_request import JsonObjectFormat
from workers.gateway.schemas.responses import (
    FunctionChoice,
    FunctionTool,
    ImageChoice,
    McpChoice,
    McpTool,
    ResponseFields,
    ResponseRequest,
    ResponseTool,
    SchemaFormat,
)

RESPONSE_FIELDS = ClientFields(
    {
        **dict.fromkeys((*PROMPT_FIELDS, "items"), "input"),
        "sampling_params.structured_outputs": "text.format",
        "sampling_params.max_tokens": "max_output_tokens",
    }
)

REFERENCE = "item_reference"
MAX_ITEMS = 1024
MAX_ANCESTORS = 256
LOGPROBS = "message.output_text.logprobs"
# Types of items that other servers accept. They are refused as unsupported.
_UNSUPPORTED_ITEMS = (
    # Pagemill does not separate a model's reasoning from its answer.
    "reasoning", "computer_call", "computer_call_output", "web_search_call",
    "file_search_call", "code_interpreter_call", "local_shell_call", "local_shell_call_output",
    "custom_tool_call", "custom_tool_call_output", "compaction",
    "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
)  # fmt: skip


def references_of(value: Any) -> set[str]:
    """Return the ids of stored items that an input has in place of the items."""
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    ids = [item.get("id") for item in items if item.get("type") == REFERENCE]
    return {name for name in ids if isinstance(name, str)}


def input_of(
    value: Any,
    response_id: str,
    stored: Mapping[str, Item] | None = None,
    *,
    ignores_unknown: bool = False,
) -> list[Item]:
    """Return the input items, each with an id. `stored` has the items that the input refers to.

    Raises a RequestError, or NotFound for a reference without an item, naming the field.
    """
    if value is None:
        raise InvalidRequest("input is missing", field="input")
    if isinstance(value, str):
        items: list[Item] = [MessageItem("user", value)]
    elif isinstance(value, list) and 0 < len(value) <= MAX_ITEMS:
        items = [
            _item_of(item, f"input[{i}]", stored or {}, ignores_unknown)
            for i, item in enumerate(value)
        ]
    else:
        raise InvalidRequest(f"input must be text, or 1 to {MAX_ITEMS} items", field="input")
    return [_with_id(item, response_id, i) for i, item in enumerate(items)]


def _item_of(value: Any, field: str, stored: Mapping[str, Item], ignores_unknown: bool) -> Item:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: must be an object", field=field)
    kind = value.get("type")
    if kind == REFERENCE:
        name = value.get("id")
        if not isinstance(name, str) or name not in stored:
            raise NotFound(f"{field}: there is no stored item {name!r}", field=f"{field}.id")
        return stored[name]
    if kind in _UNSUPPORTED_ITEMS:
        raise UnsupportedParameter(f"{field}: {kind} is not supported here", field=f"{field}.type")
    typed = {"type": "message"} | value
    item: Item = converted(typed, Item, root=field, ignores_unknown=ignores_unknown)
    match item:
        case MessageItem(content=list(parts)):
            for i, part in enumerate(parts):
                _check_part(part, f"{field}.content[{i}]")
        case FunctionOutputItem(output=list(outputs)):
            for i, output in enumerate(outputs):
                _check_part(output, f"{field}.output[{i}]")
        case _:
            pass
    return item


def _check_part(part: MessagePart, field: str) -> None:
    """Raises a RequestError for a part without the location of its file."""
    if isinstance(part, InputImagePart) and (part.image_url is None) == (part.file_id is None):
        raise InvalidRequest("an input_image needs an image_url or a file_id", field=field)
    if isinstance(part, InputFilePart) and not part.has_one_file:
        raise InvalidRequest(
            "an input_file needs one of file_data, file_id and file_url", field=field
        )


def _with_id(item: Item, response_id: str, index: int) -> Item:
    if item.id is not None:
        return item
    kind = str(type(item).__struct_config__.tag)
    return replace(item, id=item_id(kind, response_id, "input", index))


class ConversationBefore(Struct, frozen=True):
    """Conversation that a response continues."""

    ancestors: list[str] = []
    items: list[Item] = []
    approved: list[ApprovedCall] = []


def needs_card(request: ResponseFields, items: Sequence[Item]) -> bool:
    """Return whether the card of a model that writes text is needed, for tools or earlier calls."""
    return bool(request.tools) or any(
        isinstance(item, FunctionCallItem | McpCallItem | ImageCallItem) for item in items
    )


def begun_of(
    request: ResponseRequest,
    tenant: str,
    created_s: int,
    items: list[Item],
    before: ConversationBefore,
    card: ModelCard | None,
    config: AgentConfig,
    painter: PaintTool | None = None,
) -> Begun:
    """Return the first step of a response.

    `card` is required if `needs_card` returns True. Raises a RequestError naming the field.
    """
    if request.background and request.store is False:
        raise InvalidRequest("background requires store", field="background")
    structure = _structure_of(request)
    choice, functions = choice_of(request), functions_of(request)
    servers = servers_of(request, config)
    writes_text = painter is None or painter.prompt is None
    if request.tools and choice.mode != "none" and writes_text:
        check_calls(request, choice, card, has_format=structure is not None)
    sampling = _sampling_of(request)
    if structure is not None:
        sampling["structured_outputs"] = structure
    max_tool_calls = config.max_tool_calls
    if request.max_tool_calls is not None:
        max_tool_calls = min(max_tool_calls, request.max_tool_calls)
    is_named = isinstance(request.tool_choice, FunctionChoice | McpChoice | ImageChoice)
    return Begun(
        0,
        created_s,
        request.model,
        tenant,
        items,
        _echo_of(request),
        sampling,
        request.instructions,
        before.ancestors,
        store=request.store is not False,
        background=bool(request.background),
        functions=functions,
        servers=servers,
        approved=before.approved,
        painter=painter,
        choice=choice,
        parser=None if card is None else card.tool_parser,
        call_signs=None if card is None else card.call_signs,
        shows_tools=card is None or card.takes_tools,
        one_call=request.parallel_tool_calls is False or is_named,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=max_tool_calls,
        max_turns=config.max_turns,
        deadline_s=created_s + math.ceil(config.timeout_s),
        truncate=request.truncation == "auto",
        prompt_cache_key=request.prompt_cache_key,
        lane="batch" if request.service_tier == "flex" else "interactive",
        logprobs=LOGPROBS in (request.include or []),
    )


def asks_at_once(begun: Begun) -> bool:
    """Return whether a response begins with a turn of the model.

    A response in the background is queued until an agent continues it.
    """
    paints = begun.painter is not None and begun.painter.prompt is not None
    return not (begun.servers or begun.approved or begun.background or begun.truncate or paints)


def _structure_of(request: ResponseFields) -> Mapping[str, object] | None:
    match None if request.text is None else request.text.format:
        case JsonObjectFormat():
            return {"json_object": True}
        case SchemaFormat(schema=schema, strict=strict):
            return {"json_schema": closed(schema, "text.format", strict=True) if strict else schema}
        case _:
            return None


def _sampling_of(request: ResponseRequest) -> dict[str, object]:
    values = {"temperature": request.temperature, "top_p": request.top_p}
    sampling: dict[str, object] = {
        name: value for name, value in values.items() if value is not None
    }
    wants_logprobs = LOGPROBS in (request.include or [])
    if request.top_logprobs and not wants_logprobs:
        raise InvalidRequest(f"top_logprobs require include: {LOGPROBS}", field="top_logprobs")
    if wants_logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    return sampling


def _echo_of(request: ResponseRequest) -> dict[str, object]:
    """Return the fields of the request that the response repeats."""
    text_format = None if request.text is None else request.text.format
    optional = {
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "truncation": request.truncation,
        "metadata": request.metadata,
        "top_logprobs": request.top_logprobs,
        # The tier that is used: `auto` is not one.
        "service_tier": "flex" if request.service_tier == "flex" else None,
    }
    echo: dict[str, object] = {name: value for name, value in optional.items() if value is not None}
    for name in _REPEATED:
        echo[name] = getattr(request, name)
    echo["reasoning"] = {"effort": None, "summary": None}
    echo["text"] = {"format": {"type": "text"} if text_format is None else text_format}
    echo["tools"] = [_tool_echo(tool) for tool in request.tools or []]
    json_echo: dict[str, object] = to_builtins(echo)
    return json_echo


def _tool_echo(tool: ResponseTool) -> dict[str, object]:
    """Return a tool as the response repeats it, without the fields that the request omits."""
    required = {FunctionTool: ("parameters", "strict"), McpTool: ("headers",)}.get(type(tool), ())
    fields = to_builtins(tool).items()
    return {name: value for name, value in fields if value is not None or name in required}


_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user",
)  # fmt: skip
