"""Prompts as messages for a chat template, and as token ids with room for media. Pure.

The module uses neither a tokenizer nor images.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.multimodal import (
    DEFAULT_SAMPLING,
    DOCUMENT,
    FileKind,
    FrameSampling,
    Modality,
    Page,
    PlaceholderRange,
    Placement,
)
from shared.protocol.requests import (
    AudioPart,
    ContentPart,
    DocumentPart,
    Feature,
    Message,
    Prompt,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from shared.protocol.text_length import texts_of
from shared.protocol.value_limits import check_json

Transform = Callable[[Any], Any]


class MediaPart(NamedTuple):
    """A content part that refers to a media file."""

    modality: Modality
    field: str
    """Name of the request's field with the URL."""
    url: str
    sampling: FrameSampling = DEFAULT_SAMPLING
    """Frames of a video that the request selects, or the page of a document."""

    @property
    def kind(self) -> FileKind:
        """Kind of the file at the URL."""
        return self.modality if self.sampling.page is None else DOCUMENT


class SizedMedia(Protocol):
    """A medium with a known number of tokens."""

    @property
    def modality(self) -> Modality: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def placement(self) -> Placement | None: ...


def same(value: Any) -> Any:
    return value


# -- placeholders ---------------------------------------------------------------------------------


def expand(
    token_ids: Sequence[int],
    media: Sequence[SizedMedia],
    placeholder_ids: Mapping[Modality, int],
    field: str = "messages",
) -> tuple[list[int], list[PlaceholderRange]]:
    """Replace the placeholder of each medium by the medium's tokens; other tokens do not change.

    A medium without a placement has `num_tokens` placeholders. Returns the expanded ids and the
    range of each medium. Raises InvalidRequest if the placeholders in the prompt do not match the
    media, in their order. The time is linear in the size of the output.
    """
    all_ids = frozenset(placeholder_ids.values())
    positions = [i for i, token_id in enumerate(token_ids) if token_id in all_ids]
    expected = [placeholder_ids[medium.modality] for medium in media]
    if [token_ids[i] for i in positions] != expected:
        raise InvalidRequest(
            f"the prompt has {len(positions)} placeholders, which do not match the request's"
            f" {len(media)} media",
            field=field,
        )
    expanded: list[int] = []
    ranges = []
    start = 0
    for position, medium in zip(positions, media, strict=True):
        stop, follows = _replaced(token_ids, position, medium.placement)
        expanded += token_ids[start:stop]
        ranges.append(_range_of(medium, len(expanded)))
        if medium.placement is None:
            expanded += [token_ids[position]] * medium.num_tokens
        else:
            expanded += medium.placement.token_ids
        start = follows
    expanded += token_ids[start:]
    return expanded, ranges


def _replaced(
    token_ids: Sequence[int], position: int, placement: Placement | None
) -> tuple[int, int]:
    """Return the start and the end of the tokens that a placement replaces."""
    marks = None if placement is None else placement.marks
    if marks is None or position == 0 or position + 1 == len(token_ids):
        return position, position + 1
    if marks == (token_ids[position - 1], token_ids[position + 1]):
        return position - 1, position + 2
    return position, position + 1


def _range_of(medium: SizedMedia, offset: int) -> PlaceholderRange:
    placement = medium.placement
    if placement is None:
        return PlaceholderRange(offset, medium.num_tokens)
    return PlaceholderRange(offset, len(placement.token_ids), placement.is_embed())


def feature_fields(features: Sequence[Feature], name: str) -> list[str]:
    """Return the field of each feature in a client's `features`, which has lists by modality."""
    counts: dict[Modality, int] = {}
    fields = []
    for feature in features:
        number = counts.get(feature.modality, 0)
        counts[feature.modality] = number + 1
        fields.append(f"features.{name}.{feature.modality}[{number}]")
    return fields


def check_ranges(
    token_ids: Sequence[int],
    features: Sequence[Feature],
    placeholder_ids: Mapping[Modality, int],
    embed_ids: Mapping[Modality, tuple[int, ...]],
) -> list[PlaceholderRange]:
    """Return the placeholder ranges of the features.

    Other servers send the beginning and the end of a range. If the items of a modality may contain
    text, `embed_ids` has the tokens that embeddings replace. Raises InvalidRequest unless each
    range begins after the previous range, ends within the prompt and has placeholders of its
    modality, and no other tokens if the modality has no text.
    """
    fields = feature_fields(features, "mm_placeholders")
    ranges = []
    free_from = 0
    for feature, field in zip(features, fields, strict=True):
        start, stop = feature.offset, feature.offset + feature.length
        placeholder_id = placeholder_ids[feature.modality]
        if start < free_from:
            raise InvalidRequest(
                f"[{start}, {stop}) begins before {free_from}, the end of the previous item",
                field=field,
            )
        if stop > len(token_ids):
            raise InvalidRequest(
                f"[{start}, {stop}) is outside the prompt's {len(token_ids)} tokens", field=field
            )
        run = list(token_ids[start:stop])
        is_whole = run.count(placeholder_id) == len(run)
        replaced = embed_ids[feature.modality]
        if not is_whole and not replaced:
            raise InvalidRequest(
                f"[{start}, {stop}) has tokens other than {placeholder_id}, the placeholder of"
                f" {feature.modality}s",
                field=field,
            )
        mask = None if is_whole else Placement(run, replaced).is_embed()
        ranges.append(PlaceholderRange(start, feature.length, mask))
        free_from = stop
    return ranges


# -- messages -------------------------------------------------------------------------------------


def field_of(prompt: Prompt) -> str:
    """Return the field for errors about the whole prompt."""
    if prompt.token_ids is not None:
        return "prompt_token_ids"
    return "messages" if prompt.text is None else "prompt"


class PagePart(DocumentPart, frozen=True, kw_only=True):
    """A page of a document, which becomes one image."""

    page: Page

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(page=self.page)


class ExpandedMessage(Message, frozen=True, kw_only=True):
    """Message with pages and texts in place of documents."""

    indexes: list[int]
    """Index of each content part in the client's message."""


def parts_of(messages: Sequence[Message]) -> Iterator[tuple[str, ContentPart]]:
    """Yield all content parts, each with the client's field."""
    for i, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        indexes = message.indexes if isinstance(message, ExpandedMessage) else range(len(parts))
        for j, part in zip(indexes, parts, strict=True):
            yield f"messages[{i}].content[{j}]", part


def media_parts(messages: Sequence[Message]) -> Iterator[MediaPart]:
    """Yield all media parts in the order of the templated prompt.

    A document that is not expanded yet counts as one image, unless only its text is used.
    """
    for field, part in parts_of(messages):
        if isinstance(part, TextPart):
            continue
        if isinstance(part, DocumentPart) and part.document_url.mode == "text":
            continue
        sampling = DEFAULT_SAMPLING
        if isinstance(part, VideoPart | AudioPart | PagePart):
            sampling = part.sampling
        yield MediaPart(part.modality, f"{field}.{part.url_field}", part.url, sampling)


def template_messages(
    messages: Sequence[Message],
    *,
    parts: bool,
    strings: bool = True,
    placeholders: Mapping[Modality, str] = {},
    text: Callable[[str], str] = str,
    value: Transform = same,
) -> list[dict[str, Any]]:
    """Return messages in the shape that chat templates expect.

    `text` is applied to every text, `value` to the client's other values. A plain string becomes a
    part unless the template accepts `strings`. The texts of a list of parts, and the
    `placeholders` of its media, are joined by newlines unless the template accepts `parts`, as the
    templates of most multimodal models do. vLLM joins them too, because the templates of text
    models concatenate the content as a string.
    """
    contents = [
        _template_parts(message, strings, text)
        if parts
        else _template_text(message, placeholders, text)
        for message in messages
    ]
    return [
        {"role": message.role, "content": content} | _calls_and_names(message, value)
        for message, content in zip(messages, contents, strict=True)
    ]


def template_tools(tools: Sequence[Tool], value: Transform = same) -> list[dict[str, Any]] | None:
    """Return tools in the shape that chat templates expect; None for no tools."""
    shaped = []
    for tool in tools:
        function = msgspec.structs.asdict(tool.function)
        fields = {name: value(it) for name, it in function.items() if it is not None}
        shaped.append({"type": tool.type, "function": fields})
    return shaped or None


def parse_arguments(call: ToolCall) -> Any:
    """Return a call's arguments as templates expect them: an object, or text if it is not one."""
    text = call.function.arguments
    if not text.strip():
        return {}
    try:
        check_json(text.encode())
        parsed = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def strings_by_field(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield the client's strings with their fields; the texts of one message are joined."""
    for i, message in enumerate(prompt.messages):
        yield f"messages[{i}].content", "".join(texts_of(message))
        for name, value in _calls_and_names(message, same).items():
            yield from ((f"messages[{i}].{name}", string) for string in _strings_in(value))
    for i, tool in enumerate(template_tools(prompt.tools) or []):
        yield from ((f"tools[{i}].function", string) for string in _strings_in(tool))
    for name, value in prompt.template_kwargs.items():
        yield from ((f"template_kwargs.{name}", string) for string in _strings_in(value))


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings_in(inner)


def _calls_and_names(message: Message, value: Transform) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": value(call.id),
                "type": call.type,
                "function": {
                    "name": value(call.function.name),
                    "arguments": value(parse_arguments(call)),
                },
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (text := getattr(message, name)) is not None:
            fields[name] = value(text)
    return fields


def _template_text(
    message: Message, placeholders: Mapping[Modality, str], text: Callable[[str], str]
) -> str:
    content = message.content or ""
    if isinstance(content, str):
        return text(content)
    return "\n".join(
        text(part.text) if isinstance(part, TextPart) else placeholders[part.modality]
        for part in content
    )


def _template_parts(
    message: Message, strings: bool, text: Callable[[str], str]
) -> str | list[dict[str, str]]:
    content = message.content
    if content is None:
        return "" if strings else []
    if isinstance(content, str):
        if strings:
            return text(content)
        content = [TextPart(content)]
    return [
        {"type": "text", "text": text(part.text)}
        if isinstance(part, TextPart)
        else {"type": part.modality}
        for part in content
    ]
