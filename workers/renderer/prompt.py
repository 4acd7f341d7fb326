"""The prompt as messages for a chat template, and as token ids with room for pictures.

Pure: it sees neither a tokenizer nor a picture.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.messages import ImagePart, Message, TextPart
from shared.multimodal import PlaceholderRange


def expand(
    token_ids: Sequence[int], placeholder_id: int, counts: Sequence[int]
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
            field="messages",
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
) -> list[dict[str, Any]]:
    """Messages in the shape that chat templates expect; `text` is applied to every text.

    A plain string stays one if the template takes `strings`; otherwise it becomes a part. A list of
    parts stays one if the template takes `parts`, as those of multimodal models do; otherwise its
    texts are joined by newlines, as vLLM does, because the templates of text models concatenate the
    content as a string.
    """
    return [
        {"role": message.role, "content": _template_content(message, parts, strings, text)}
        for message in messages
    ]


def _template_content(
    message: Message, parts: bool, strings: bool, text: Callable[[str], str]
) -> str | list[dict[str, str]]:
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        if strings:
            return text(content)
        content = [TextPart(content)]
    if not parts:
        return "\n".join(text(string) for string in texts(message))
    return [
        {"type": "text", "text": text(part.text)}
        if isinstance(part, TextPart)
        else {"type": "image"}
        for part in content
    ]
