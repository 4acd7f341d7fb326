"""The prompt as messages for a chat template, and as token ids with room for pictures.

Pure: it sees neither a tokenizer nor a picture.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.messages import (
    ImagePart,
    Message,
    Prompt,
    TextPart,
    Tool,
    ToolCall,
)
from shared.protocol.multimodal import IMAGE, PlaceholderRange

Value = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def expand(
    token_ids: Sequence[int],
    placeholder_id: int,
    counts: Sequence[int],
    field: str = "messages",
) -> tuple[list[int], list[PlaceholderRange]]:
    """Repeat the i-th placeholder `counts[i]` times; all other tokens stay as they are.

    Returns the expanded ids and the run that each placeholder became. Raises InvalidRequest when
    there are not as many placeholders as counts. Takes time linear in its output.
    """
    positions = [i for i, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(positions) != len(counts):
        raise InvalidRequest(
            f"the prompt has {len(positions)} places for pictures, the request {len(counts)}"
            " pictures",
            field=field,
        )
    expanded: list[int] = []
    ranges = []
    start = 0
    for position, count in zip(positions, counts, strict=True):
        expanded += token_ids[start:position]
        ranges.append(PlaceholderRange(len(expanded), count))
        expanded += [placeholder_id] * count
        start = position + 1
    expanded += token_ids[start:]
    return expanded, ranges


def check_ranges(
    token_ids: Sequence[int], placeholder_id: int, ranges: Sequence[PlaceholderRange]
) -> None:
    """Raises InvalidRequest unless each range lies behind the one before it and within the prompt,
    and consists of placeholders."""
    free_from = 0
    for i, placeholder in enumerate(ranges):
        field = f"features.mm_placeholders.image[{i}]"
        stop = placeholder.offset + placeholder.length
        if placeholder.offset < free_from:
            raise InvalidRequest(
                f"[{placeholder.offset}, {stop}) begins before {free_from}, where the picture"
                " before it ends",
                field=field,
            )
        if stop > len(token_ids):
            raise InvalidRequest(
                f"[{placeholder.offset}, {stop}) is outside the prompt's {len(token_ids)} tokens",
                field=field,
            )
        if any(token_ids[at] != placeholder_id for at in range(placeholder.offset, stop)):
            raise InvalidRequest(
                f"[{placeholder.offset}, {stop}) has tokens other than {placeholder_id}, which"
                " stands for pictures",
                field=field,
            )
        free_from = stop


def field_of(asked: Prompt) -> str:
    """What a complaint of the whole prompt names."""
    if asked.token_ids is not None:
        return "prompt_token_ids"
    return "messages" if asked.text is None else "prompt"


def image_parts(messages: Sequence[Message]) -> Iterator[tuple[str, ImagePart]]:
    """Every picture with its field name, in the order in which the template writes them."""
    for i, message in enumerate(messages):
        if message.content is None or isinstance(message.content, str):
            continue
        for j, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                yield f"messages[{i}].content[{j}].image_url.url", part


def texts(message: Message) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content or [] if isinstance(part, TextPart)]


def template_messages(
    messages: Sequence[Message],
    *,
    parts: bool,
    strings: bool = True,
    text: Callable[[str], str] = str,
    value: Value = _same,
) -> list[dict[str, Any]]:
    """Messages in the shape that chat templates expect; `text` is applied to every text, `value` to
    whatever else the client has chosen.

    A plain string stays one if the template takes `strings`; otherwise it becomes a part. A list of
    parts stays one if the template takes `parts`, as those of multimodal models do; otherwise its
    texts are joined by newlines, as vLLM does, because the templates of text models concatenate the
    content as a string.
    """
    return [
        {"role": message.role, "content": _template_content(message, parts, strings, text)}
        | _calls_and_names(message, value)
        for message in messages
    ]


def template_tools(tools: Sequence[Tool], value: Value = _same) -> list[dict[str, Any]] | None:
    """Tools in the shape that chat templates expect; None for none."""
    found = []
    for tool in tools:
        function = msgspec.structs.asdict(tool.function)
        given = {name: value(it) for name, it in function.items() if it is not None}
        found.append({"type": tool.type, "function": given})
    return found or None


def _calls_and_names(message: Message, value: Value) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": value(call.id),
                "type": call.type,
                "function": {
                    "name": value(call.function.name),
                    "arguments": value(arguments_of(call)),
                },
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (given := getattr(message, name)) is not None:
            found[name] = value(given)
    return found


def arguments_of(call: ToolCall) -> Any:
    """As templates expect them: an object, unless the text is none."""
    text = call.function.arguments
    if not text.strip():
        return {}
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)


def written(asked: Prompt) -> Iterator[str]:
    """All that a template may write of what the client has written."""
    for message in asked.messages:
        yield from texts(message)
        for call in message.tool_calls:
            yield from (call.id, call.function.name, call.function.arguments)
        yield from (message.tool_call_id or "", message.name or "")
    if asked.tools or asked.template_kwargs:
        yield msgspec.json.encode((asked.tools, asked.template_kwargs)).decode()


def strings_by_field(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """What the client has written, with the name of its field; neighbouring texts in one."""
    for i, message in enumerate(prompt.messages):
        yield f"messages[{i}].content", "".join(texts(message))
        for name, value in _calls_and_names(message, _same).items():
            yield from ((f"messages[{i}].{name}", string) for string in strings_in(value))
    for i, tool in enumerate(template_tools(prompt.tools) or []):
        yield from ((f"tools[{i}].function", string) for string in strings_in(tool))
    for name, value in prompt.template_kwargs.items():
        yield from ((f"template_kwargs.{name}", string) for string in strings_in(value))


def _template_content(
    message: Message, parts: bool, strings: bool, text: Callable[[str], str]
) -> str | list[dict[str, str]]:
    content = message.content
    if content is None:
        return "" if strings else []
    if isinstance(content, str):
        if strings:
            return text(content)
        content = [TextPart(content)]
    if not parts:
        return "\n".join(text(string) for string in texts(message))
    return [
        {"type": "text", "text": text(part.text)} if isinstance(part, TextPart) else {"type": IMAGE}
        for part in content
    ]
