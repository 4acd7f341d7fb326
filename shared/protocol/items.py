"""Items of responses: the input of a response and its output, as clients write and read them.

A client may send an output item back as an input item without changes, so each kind of item has one
type. Fields of official clients that are not supported accept only null, and are not in answers.
"""

import hashlib
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from shared.helpers import patterns
from shared.protocol.multimodal import MEDIA_SCHEME, Overflow
from shared.protocol.requests import (
    DEFAULT_DPI,
    DocumentMode,
    DocumentPart,
    DocumentURL,
    Dpi,
    Pages,
)

Ignored = UnsetType | None
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Label = Annotated[str, Meta(pattern=patterns.NAME)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
FileId = Annotated[str, Meta(pattern=patterns.FILE_ID)]
"""Id of a file of `/v1/files`. `media:` and this id is a URL of the file."""


class InputTextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="input_text"):
    text: str
    prompt_cache_breakpoint: Ignored = UNSET


class InputImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="input_image"):
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"
    file_id: FileId | None = None
    """Id of a stored file, instead of a URL."""
    prompt_cache_breakpoint: Ignored = UNSET


class InputAudio(Struct, frozen=True, forbid_unknown_fields=True):
    """Sound that is part of the message."""

    data: str
    """Base64 of the file, or the `media:` URL of a stored file."""
    format: str
    """No effect: the format is detected from the file."""
    overflow: Overflow = "refuse"
    """As in `audio_url`."""

    @property
    def is_inline(self) -> bool:
        return not self.data.startswith(MEDIA_SCHEME)

    @property
    def url(self) -> str:
        return f"data:;base64,{self.data}" if self.is_inline else self.data


class InputAudioPart(Struct, frozen=True, forbid_unknown_fields=True, tag="input_audio"):
    input_audio: InputAudio


class InputFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PDF document, with exactly one of `file_data`, `file_id` and `file_url`."""

    file_data: str | None = None
    """Base64 of the file, alone or as a `data:` URL."""
    file_id: FileId | None = None
    """Id of a stored file."""
    file_url: str | None = None
    """URL of the file, as for an image."""
    filename: str | None = None
    """Name of the file. A stored file has the name with which it was stored."""
    pages: Pages | None = None
    """As in DocumentURL."""
    dpi: Dpi | None = None
    """As in DocumentURL."""
    mode: DocumentMode | None = None
    """As in DocumentURL."""

    @property
    def has_one_file(self) -> bool:
        return [self.file_data, self.file_id, self.file_url].count(None) == 2

    @property
    def url(self) -> str:
        if self.file_id is not None:
            return f"{MEDIA_SCHEME}{self.file_id}"
        if self.file_data is None:
            return self.file_url or ""
        is_url = self.file_data.startswith("data:")
        return self.file_data if is_url else f"data:;base64,{self.file_data}"

    @property
    def document(self) -> DocumentPart:
        mode = self.mode or "images"
        return DocumentPart(DocumentURL(self.url, self.pages, self.dpi or DEFAULT_DPI, mode))


class InputFilePart(InputFile, frozen=True, kw_only=True, tag="input_file"):
    """PDF document. A stored file may also be an image, a video or a sound, by the ending of its
    name."""

    detail: Literal["auto", "low", "high"] | None = None
    """No effect."""
    prompt_cache_breakpoint: Ignored = UNSET


class OutputTextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = []


class RefusalPart(Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    refusal: str


MediaPart = InputImagePart | InputAudioPart | InputFilePart
MessagePart = InputTextPart | MediaPart | OutputTextPart | RefusalPart


class MessageItem(Struct, frozen=True, forbid_unknown_fields=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Ignored = UNSET


class FunctionCallItem(Struct, frozen=True, forbid_unknown_fields=True, tag="function_call"):
    call_id: str
    name: ToolName
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: Ignored = UNSET
    is_async: Ignored = field(default=UNSET, name="async")
    async_: Ignored = UNSET
    caller: Ignored = UNSET


class FunctionOutputItem(
    Struct, frozen=True, forbid_unknown_fields=True, tag="function_call_output"
):
    """Result of a function that the client has called."""

    call_id: str
    output: str | list[InputTextPart | InputImagePart | InputFilePart]
    id: str | None = None
    status: ItemStatus | None = None
    caller: Ignored = UNSET


class ListedTool(Struct, frozen=True):
    """Description of a tool by its MCP server."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class ListToolsItem(Struct, frozen=True, forbid_unknown_fields=True, tag="mcp_list_tools"):
    id: str
    server_label: Label
    tools: list[ListedTool]
    error: str | None = None


class McpCallItem(Struct, frozen=True, forbid_unknown_fields=True, tag="mcp_call"):
    id: str
    server_label: Label
    name: ToolName
    arguments: str
    status: Literal["in_progress", "calling", "completed", "incomplete", "failed"] | None = None
    output: str | None = None
    error: dict[str, Any] | str | None = None
    approval_request_id: str | None = None


class ImageCallItem(Struct, frozen=True, forbid_unknown_fields=True, tag="image_generation_call"):
    """Image that was painted for a response."""

    id: str
    status: Literal["in_progress", "generating", "completed", "failed"] | None = None
    result: str | None = None
    """Base64 of the file."""
    revised_prompt: str | None = None
    """Prompt of the image."""
    size: str | None = None
    output_format: Literal["png"] | None = None
    action: Literal["generate", "edit"] | None = None
    background: Literal["opaque"] | None = None
    quality: Literal["auto"] | None = None
    error: dict[str, Any] | None = None
    svg_usage: Ignored = UNSET


class ApprovalRequestItem(
    Struct, frozen=True, forbid_unknown_fields=True, tag="mcp_approval_request"
):
    id: str
    server_label: Label
    name: ToolName
    arguments: str


class ApprovalResponseItem(
    Struct, frozen=True, forbid_unknown_fields=True, tag="mcp_approval_response"
):
    approval_request_id: str
    approve: bool
    id: str | None = None
    reason: str | None = None


CallItem = McpCallItem | ImageCallItem
"""Calls made by an agent, not by the client."""
OutputItem = MessageItem | FunctionCallItem | ListToolsItem | CallItem | ApprovalRequestItem
Item = OutputItem | FunctionOutputItem | ApprovalResponseItem

RESPONSE_PREFIX = "resp_"
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "image_generation_call": "ig",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}


def item_id(kind: str, response_id: str, step: str, index: int = 0) -> str:
    """Return the id of an item, which is the same in every process.

    `step` is the name of the response's step that creates the item, and `index` counts the items of
    this kind in the step. `response_of_item` returns the response of the id.
    """
    name = response_id.removeprefix(RESPONSE_PREFIX)
    return f"{ID_PREFIXES[kind]}_{name}_{step}_{index}"


def response_of_item(name: str) -> str | None:
    """Return the id of the response in an id of `item_id`; None for another id."""
    _, *parts = name.split("_", 2)
    return RESPONSE_PREFIX + parts[0] if len(parts) == 2 else None


def new_call_id(form: str | None, response_id: str, turn: int, index: int) -> str:
    """Return the id of a function call. Mistral's chat templates accept only nine digits."""
    digest = _digest(response_id, f"call:{turn}", index)
    return f"{int(digest, 16) % 10**9:09d}" if form == "mistral" else f"call_{digest}"


def _digest(response_id: str, step: str, index: int) -> str:
    return hashlib.sha256(f"{response_id}:{step}:{index}".encode()).hexdigest()
