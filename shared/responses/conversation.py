"""Conversion of a response's conversation into the messages of a request. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shared.errors import InvalidRequest
from shared.protocol.items import (
    ApprovalResponseItem,
    FunctionCallItem,
    FunctionOutputItem,
    ImageCallItem,
    InputAudioPart,
    InputFilePart,
    InputImagePart,
    InputTextPart,
    Item,
    McpCallItem,
    MessageItem,
    MessagePart,
    OutputTextPart,
    RefusalPart,
)
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, MEDIA_SCHEME, VIDEO, FileKind
from shared.protocol.requests import (
    AudioPart,
    AudioURL,
    ContentPart,
    FunctionCall,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
    ToolCall,
    VideoPart,
    VideoURL,
)
from shared.responses.state import ResponseState
from shared.responses.tools import PAINT, paint_arguments, prompt_name


class Entry(NamedTuple):
    """An item of a conversation. Calls with the same mark were made in one turn."""

    item: Item
    mark: object = None


def entries_of(state: ResponseState) -> list[Entry]:
    """Return the items of a response, its input first."""
    assert state.begun is not None
    inputs = [Entry(item) for item in state.begun.input]
    outputs = zip(state.output, state.output_turns, strict=True)
    return inputs + [Entry(item, (state.response_id, turn)) for item, turn in outputs]


def messages_of(
    instructions: str | None, entries: Iterable[Entry], *, takes_tools: bool = True
) -> list[Message]:
    """Return the conversation as messages.

    For a chat template that takes no tools, calls and their results become plain text.
    """
    writer = _Writer(takes_tools=takes_tools)
    if instructions:
        writer.messages.append(Message("system", instructions))
    for entry in entries:
        writer.add(entry)
    writer.flush()
    return writer.messages


class _Writer:
    """Builder of the messages. The text and the calls of one turn become one message."""

    def __init__(self, *, takes_tools: bool) -> None:
        self.messages: list[Message] = []
        self._takes_tools = takes_tools
        self._text: str | None = None
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        self._mark: object = None

    def add(self, entry: Entry) -> None:
        match entry.item:
            case MessageItem(role="assistant", content=content):
                if self._text is not None or self._calls:
                    self.flush()
                self._text, self._mark = _text_of(content), entry.mark
            case MessageItem(role=role, content=content):
                self.flush()
                role = "system" if role == "developer" else role
                self.messages.append(Message(role, _content_of(content)))
            case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
                self._add_call(entry.mark, call_id, name, arguments)
            case FunctionOutputItem(call_id=call_id, output=output):
                self._add_result(call_id, _content_of(output))
            case McpCallItem() as call:
                name = prompt_name(call.server_label, call.name)
                self._add_call(entry.mark, call.id, name, call.arguments)
                self._add_result(call.id, result_text(call))
            case ImageCallItem() as image:
                arguments = paint_arguments(image.revised_prompt or "")
                self._add_call(entry.mark, image.id, PAINT, arguments)
                self._add_result(image.id, _painted_text(image))
            case ApprovalResponseItem(approve=False, reason=reason):
                why = f": {reason}" if reason else ""
                self.flush()
                self.messages.append(Message("user", f"I do not approve that call{why}."))
            case _:
                pass

    def _add_call(self, mark: object, call_id: str, name: str, arguments: str) -> None:
        if self._results and (mark is None or mark != self._mark):
            self.flush()
        self._mark = mark
        self._calls.append(ToolCall(call_id, FunctionCall(name, arguments)))

    def _add_result(self, call_id: str, content: str | list[ContentPart]) -> None:
        self._results.append(Message("tool", content, tool_call_id=call_id))

    def flush(self) -> None:
        """Add the pending message of the assistant, and the results of its calls."""
        if self._calls and not self._takes_tools:
            self._flush_as_text()
        else:
            if self._calls or self._text is not None:
                self.messages.append(Message("assistant", self._text, self._calls))
            self.messages += self._results
        self._text, self._calls, self._results, self._mark = None, [], [], None

    def _flush_as_text(self) -> None:
        calls = [f"{call.function.name}({call.function.arguments})" for call in self._calls]
        self.messages.append(Message("assistant", "\n".join([self._text or "", *calls]).strip()))
        self.messages += [Message("user", result.content) for result in self._results]


def result_text(call: McpCallItem) -> str:
    """Return the result of a call as a text for the model."""
    return output_text(call.output, call.error)


def output_text(output: str | None, error: dict[str, Any] | str | None) -> str:
    """Return the output of a call, or its error, as a text for the model."""
    if output is not None:
        return output
    if isinstance(error, dict):
        parts = error.get("content") or [{"text": error.get("message")}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        message = "\n".join(text for text in texts if isinstance(text, str))
        return message or "the call has failed"
    return error or "the call was not made"


def _painted_text(image: ImageCallItem) -> str:
    """Return the result of painting as a text for the model, which does not see the image."""
    if image.status != "completed":
        return (image.error or {}).get("message") or "no image was painted"
    return "The image is painted, and the user is shown it."


def check_outputs(items: Sequence[Item]) -> None:
    """Raises InvalidRequest for a call without a result, or a result without a call."""
    called = {item.call_id for item in items if isinstance(item, FunctionCallItem)}
    done = {item.call_id for item in items if isinstance(item, FunctionOutputItem)}
    for missing in sorted(called - done):
        raise InvalidRequest(
            f"there is no output of the call {missing}: add a function_call_output item for it",
            field="input",
        )
    for unknown in sorted(done - called):
        raise InvalidRequest(
            f"there is no call {unknown} for this output: add its function_call item, or set"
            " previous_response_id",
            field="input",
        )


def _text_of(content: str | Sequence[MessagePart]) -> str:
    if isinstance(content, str):
        return content
    parts = (_part_of(part) for part in content)
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _content_of(content: str | Sequence[MessagePart]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = map(_part_of, content)
    return [part for part in parts if part is not None]


def images_of(item: Item) -> list[tuple[str, str]]:
    """Return the fields and the URLs of the images in a message or in the output of a function."""
    match item:
        case MessageItem(content=list(parts)):
            field = "content"
        case FunctionOutputItem(output=list(parts)):
            field = "output"
        case _:
            return []
    named_parts = ((f"{field}[{i}]", _part_of(part)) for i, part in enumerate(parts))
    return [(name, part.url) for name, part in named_parts if isinstance(part, ImagePart)]


def _part_of(part: MessagePart) -> ContentPart | None:
    match part:
        case InputTextPart(text=text) | OutputTextPart(text=text) | RefusalPart(refusal=text):
            return TextPart(text)
        case InputImagePart(image_url=None, file_id=None):
            return None
        case InputImagePart(image_url=url, detail=detail, file_id=name):
            return ImagePart(ImageURL(f"{MEDIA_SCHEME}{name}" if url is None else url, detail))
        case InputAudioPart(input_audio=sound):
            return AudioPart(AudioURL(sound.url, sound.overflow))
        case InputFilePart():
            return _file_of(part)


def _file_of(part: InputFilePart) -> ContentPart | None:
    kind = DOCUMENT if part.file_id is None else kind_of_file(part.filename)
    if kind == IMAGE:
        return ImagePart(ImageURL(part.url))
    if kind == VIDEO:
        return VideoPart(VideoURL(part.url))
    if kind == AUDIO:
        return AudioPart(AudioURL(part.url))
    return part.document if kind == DOCUMENT else None


_ENDINGS: dict[FileKind, tuple[str, ...]] = {
    IMAGE: ("png", "jpg", "jpeg", "webp", "gif", "bmp"),
    VIDEO: ("mp4", "mov", "webm", "mkv", "avi"),
    AUDIO: ("wav", "flac", "ogg", "mp3", "aac", "m4a"),
    DOCUMENT: ("pdf",),
}


def kind_of_file(filename: str | None) -> FileKind | None:
    """Return the kind of a file by its name; None for a file that no model reads."""
    _, dot, ending = (filename or "").rpartition(".")
    kinds = (kind for kind, endings in _ENDINGS.items() if ending.lower() in endings)
    return next(kinds, None) if dot else None
