"""Messages: the plan of a request, which is the plan of an equal chat completion. Pure."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.encoding import to_json
from shared.protocol.items import InputFile
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import FunctionCall, FunctionDefinition, ImageURL
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.openai.chat import MAX_NAMED_FILES, ChatOptions, plan_chat
from workers.gateway.schemas.messages import (
    AnyChoice,
    AutoChoice,
    ContentBlock,
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    MessagesTool,
    NamedChoice,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from workers.gateway.schemas.openai_request import (
    ChatDocumentPart,
    ChatImagePart,
    ChatMessage,
    ChatPart,
    ChatRequest,
    ChatTextPart,
    ChatTool,
    ChatToolCall,
    FunctionName,
    JsonSchemaFormat,
    NamedSchema,
    NamedTool,
)

BILLING = "x-anthropic-billing-header:"
"""Beginning of a line that is a system block of Claude Code. It is left out, because a new number
in each request would keep the prompts of a conversation from sharing their beginning in a cache."""
FAILED = "The tool has failed."
"""First line of a result with `is_error`."""

_FORMAT = "output_config.format"
FIELDS = ClientFields(
    {
        # A message may become several, so their numbers differ from the client's.
        "messages": "messages",
        "items": "messages",
        "sampling_params.stop": "stop_sequences",
        "response_format": _FORMAT,
        "tool_choice.function.name": "tool_choice.name",
    }
)
"""Names of fields of the bus and of chat completions."""

_SAME_NAME = (
    "max_tokens", "stream", "temperature", "top_p", "top_k", "adapter", "cache_salt", "durable",
    "priority", "prompt_cache_key", "timeout_s",
)  # fmt: skip


class _Piece(NamedTuple):
    """A part of a message, or a call of a tool."""

    role: str
    content: ChatPart | ChatToolCall
    field: str
    call_id: str | None = None
    """Id of the call, for a piece of its result."""


def plan_messages(
    request: MessagesRequest, card: ModelCard | None = None
) -> SubmitPlan[ChatOptions]:
    """Return the plan of a request. `card` is needed for a request with tools.

    Raises a RequestError naming the field.
    """
    values = {name: getattr(request, name) for name in _SAME_NAME}
    return _plan(request, card, n=1, stop=request.stop_sequences, **values)


def plan_count(request: CountTokensRequest, card: ModelCard | None) -> SubmitPlan[ChatOptions]:
    """Return the plan of a request for a count of its prompt. Raises as `plan_messages`."""
    return _plan(request, card)


def _plan(
    request: CountTokensRequest, card: ModelCard | None, **values: Any
) -> SubmitPlan[ChatOptions]:
    pieces = list(_pieces_of(request))
    fields: dict[str, str] = {}
    messages = _messages_of(pieces, fields)
    choice = request.tool_choice
    is_prefilled = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=[_tool_of(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_choice_of(request),
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", False),
        response_format=_format_of(request),
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=False if is_prefilled else None,
        continue_final_message=True if is_prefilled else None,
        **values,
    )
    with FIELDS.translated(checks=True):
        plan = plan_chat(chat, card)
    chat_fields = plan.options.fields.items()
    names = {bus: FIELDS.name_of(name) for bus, name in chat_fields if "messages" not in bus}
    return replace(plan, options=replace(plan.options, fields=fields | names))


def _messages_of(pieces: Iterable[_Piece], fields: dict[str, str]) -> list[ChatMessage]:
    """Return the messages, and add the client's field of each file to `fields`.

    Consecutive pieces of a role are one message, and so is each result. Raises InvalidRequest if
    there are none.
    """
    messages: list[ChatMessage] = []
    for (role, call_id), group in itertools.groupby(pieces, lambda it: (it.role, it.call_id)):
        calls: list[ChatToolCall] = []
        parts: list[ChatPart] = []
        for piece in group:
            if isinstance(piece.content, ChatToolCall):
                calls.append(piece.content)
                continue
            if not isinstance(piece.content, ChatTextPart) and len(fields) < MAX_NAMED_FILES:
                fields[f"messages[{len(messages)}].content[{len(parts)}]"] = piece.field
            parts.append(piece.content)
        content: str | list[ChatPart] | None = parts or None
        if len(parts) == 1 and isinstance(parts[0], ChatTextPart):
            content = parts[0].text
        messages.append(ChatMessage(role, content, tool_calls=calls or None, tool_call_id=call_id))
    if not any(message.role != "system" for message in messages):
        raise InvalidRequest("messages: one of them needs content", field="messages")
    return messages


def _pieces_of(request: CountTokensRequest) -> Iterator[_Piece]:
    system = request.system or []
    if isinstance(system, str):
        system = [TextBlock(text=system)]
    for i, block in enumerate(system):
        if not block.text.startswith(BILLING) or "\n" in block.text.strip():
            yield _Piece("system", ChatTextPart(block.text), f"system[{i}]")
    for i, message in enumerate(request.messages):
        field = f"messages[{i}].content"
        if isinstance(message.content, str):
            yield _Piece(message.role, ChatTextPart(message.content), field)
            continue
        for j, part in enumerate(message.content):
            yield from _pieces_of_block(message.role, part, f"{field}[{j}]")


def _pieces_of_block(role: str, block: ContentBlock, field: str) -> Iterator[_Piece]:
    """Yield nothing for thoughts. Raises InvalidRequest for a block of another role."""
    match block:
        case ToolUseBlock():
            _check_role(role, "assistant", "tool_use", field)
            function = FunctionCall(block.name, to_json(block.input).decode())
            yield _Piece(role, ChatToolCall(block.id, function), field)
        case ToolResultBlock():
            _check_role(role, "user", "tool_result", field)
            yield from _pieces_of_result(block, field)
        case TextBlock(text=text):
            yield _Piece(role, ChatTextPart(text), field)
        case ImageBlock(source=source):
            yield _Piece(role, ChatImagePart(ImageURL(source.url)), f"{field}.source")
        case DocumentBlock():
            yield from _pieces_of_document(role, block, field)
        case SearchResultBlock():
            texts = [block.title, block.source, *(text.text for text in block.content)]
            yield _Piece(role, ChatTextPart("\n".join(texts)), field)
        case ToolReferenceBlock(tool_name=name):
            yield _Piece(role, ChatTextPart(name), field)
        case _:
            pass


def _pieces_of_result(result: ToolResultBlock, field: str) -> Iterator[_Piece]:
    call_id, content = result.tool_use_id, result.content or ""
    if result.is_error:
        yield _Piece("tool", ChatTextPart(FAILED), field, call_id)
    blocks = [TextBlock(text=content)] if isinstance(content, str) else content
    for i, block in enumerate(blocks):
        for piece in _pieces_of_block("tool", block, f"{field}.content[{i}]"):
            yield piece._replace(call_id=call_id)


def _pieces_of_document(role: str, document: DocumentBlock, field: str) -> Iterator[_Piece]:
    for text in (document.title, document.context):
        if text:
            yield _Piece(role, ChatTextPart(text), field)
    match document.source:
        case TextSource(data=text):
            yield _Piece(role, ChatTextPart(text), field)
        case ContentSource(content=content):
            blocks = [TextBlock(text=content)] if isinstance(content, str) else content
            for i, block in enumerate(blocks):
                yield from _pieces_of_block(role, block, f"{field}.source.content[{i}]")
        case source:
            file = InputFile(file_url=source.url)
            yield _Piece(role, ChatDocumentPart(file), f"{field}.source")


def _check_role(role: str, required: str, kind: str, field: str) -> None:
    if role != required:
        raise InvalidRequest(
            f"{field}: a {kind} block is only for messages of the {required}", field=field
        )


def _tool_of(tool: MessagesTool) -> ChatTool:
    return ChatTool(FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice_of(request: CountTokensRequest) -> Any:
    match request.tool_choice:
        case NamedChoice(name=name):
            return NamedTool(FunctionName(name))
        case AnyChoice():
            return "required"
        case AutoChoice():
            return "auto"
        case choice:
            return None if choice is None else "none"


def _format_of(request: CountTokensRequest) -> JsonSchemaFormat | None:
    config = request.output_config
    if config is None or config.format is None:
        return None
    return JsonSchemaFormat(NamedSchema("answer", config.format.schema))
