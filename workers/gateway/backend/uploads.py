"""Storage of files that are too large for a message. Messages refer to them by `media:` URLs."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeGuard

from msgspec.structs import replace

from shared.errors import InvalidMedia, InvalidRequest, MediaNotFound, UnsupportedContent
from shared.helpers.base64_text import decode_base64
from shared.protocol.items import (
    FunctionOutputItem,
    ImageCallItem,
    InputAudioPart,
    InputFilePart,
    InputImagePart,
    Item,
    MessageItem,
    MessagePart,
)
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.protocol.requests import (
    SEQUENCE_HEAD,
    AudioPart,
    ContentPart,
    DocumentPart,
    GenerateRequest,
    ImagePart,
    MediaContent,
    TextPart,
    VideoPart,
)
from shared.responses.conversation import kind_of_file
from shared.state import batch_files, media_store
from workers.gateway.app import AppContext
from workers.gateway.openai.response_images import NamedImage

# Lengths of data: URLs. A message has room for 8 MiB, so the limit is lower for many images.
MAX_INLINE = 256 * 2**10
MAX_INLINE_TOGETHER = 2 * 2**20
MAX_INLINE_OF_MANY = 8 * 2**10
_DATA_FIELDS: dict[type, str] = {
    InputImagePart: "image_url",
    InputAudioPart: "input_audio.data",
    InputFilePart: "file_data",
}


async def store_large_images(
    context: AppContext, request: GenerateRequest, tenant: str
) -> GenerateRequest:
    """Return the request with `media:` URLs in place of large `data:` URLs.

    Raises InvalidMedia naming the field, or Unavailable.
    """
    lengths = [
        len(part.url)
        for message in request.messages or []
        if isinstance(message.content, list)
        for part in message.content
        if _is_inline(part)
    ]
    limit = MAX_INLINE if sum(lengths) <= MAX_INLINE_TOGETHER else MAX_INLINE_OF_MANY
    if all(length <= limit for length in lengths):
        return request

    async def store(part: ContentPart, field: str) -> ContentPart:
        if not _is_inline(part) or len(part.url) <= limit:
            return part
        data = await asyncio.to_thread(decode_data, part.url, f"{field}.{part.url_field}")
        url = await context.pin_media(data, tenant)
        match part:
            case ImagePart():
                return ImagePart(replace(part.image_url, url=url))
            case VideoPart():
                return VideoPart(replace(part.video_url, url=url))
            case AudioPart():
                return AudioPart(replace(part.audio_url, url=url))
            case DocumentPart():
                return DocumentPart(replace(part.document_url, url=url))

    messages = [
        replace(
            message,
            content=[
                await store(part, f"messages[{i}].content[{j}]")
                for j, part in enumerate(message.content)
            ],
        )
        if isinstance(message.content, list)
        else message
        for i, message in enumerate(request.messages or [])
    ]
    return replace(request, messages=messages)


async def store_large_item_media(
    context: AppContext, items: Sequence[Item], tenant: str
) -> list[Item]:
    """Return the items of a response with `media:` URLs in place of large `data:` URLs.

    Painted images are left out: the prompt mentions them, but does not contain them. Raises
    InvalidMedia naming the field, or Unavailable.
    """
    lengths = [len(url) for item in items for _, part in _parts_of(item) if (url := _data_of(part))]
    limit = MAX_INLINE if sum(lengths) <= MAX_INLINE_TOGETHER else MAX_INLINE_OF_MANY
    new_items: list[Item] = []
    for i, item in enumerate(items):
        for part_field, part in _parts_of(item):
            url, field = _data_of(part), f"input[{i}].{part_field}"
            if len(url) <= limit:
                continue
            data = await asyncio.to_thread(decode_data, url, f"{field}.{_DATA_FIELDS[type(part)]}")
            media = await context.pin_media(data, tenant)
            match part:
                case InputImagePart():
                    item = _with_part(item, part, replace(part, image_url=media))
                case InputAudioPart(input_audio=sound):
                    item = _with_part(item, part, InputAudioPart(replace(sound, data=media)))
                case InputFilePart():
                    stored = replace(part, file_data=None, file_url=media)
                    item = _with_part(item, part, stored)
        new_items.append(replace(item, result=None) if isinstance(item, ImageCallItem) else item)
    return new_items


async def store_images(context: AppContext, images: Sequence[NamedImage], tenant: str) -> list[str]:
    """Return the `media:` URLs of images to edit, after storing them.

    Raises InvalidMedia naming the field, DiskFull, QuotaExceeded or Unavailable.
    """
    files = [image_of(image.url, image.field) for image in images]
    return [
        file if isinstance(file, str) else await context.pin_media(file, tenant) for file in files
    ]


async def name_files(context: AppContext, items: Sequence[Item], tenant: str) -> list[Item]:
    """Return the items with the names of their stored files. Their endings determine the types.

    Raises MediaNotFound or UnsupportedContent with the field, or Unavailable.
    """
    named_items: list[Item] = []
    for i, item in enumerate(items):
        for name, part in _parts_of(item):
            if isinstance(part, InputFilePart) and part.file_id is not None:
                field = f"input[{i}].{name}"
                filename = await _name_of(context, part.file_id, tenant, field)
                item = _with_part(item, part, replace(part, filename=filename))
        named_items.append(item)
    return named_items


async def _name_of(context: AppContext, file_id: str, tenant: str, field: str) -> str:
    name = media_store.parse_media_url(f"{MEDIA_SCHEME}{file_id}")
    file = filename = None
    if name is not None:
        for find in (media_store.look_up, batch_files.look_up):
            # A batcher stores the files of a batch again as media without their names.
            if filename is None and (stored := await find(context.bus, name, tenant)) is not None:
                file, filename = stored, stored.head.filename
    if file is None:
        raise MediaNotFound(f"there is no file {file_id!r}", field=f"{field}.file_id")
    filename = filename or ""
    if kind_of_file(filename) is None:
        raise UnsupportedContent(
            f"the name {filename!r} does not have the ending of an image, a video, a sound or a"
            " document",
            field=f"{field}.file_id",
        )
    return filename


def _data_of(part: MessagePart) -> str:
    """Return the data: URL of a part; "" for one that has none."""
    match part:
        case InputImagePart(image_url=str(url)) if url.startswith("data:"):
            return url
        case InputAudioPart(input_audio=sound) if sound.is_inline:
            return sound.url
        case InputFilePart(file_data=str()):
            return part.url
        case _:
            return ""


def _parts_of(item: Item) -> list[tuple[str, MessagePart]]:
    """Return an item's parts, each with the name of its field."""
    match item:
        case MessageItem(content=list(parts)):
            return [(f"content[{j}]", part) for j, part in enumerate(parts)]
        case FunctionOutputItem(output=list(outputs)):
            return [(f"output[{j}]", part) for j, part in enumerate(outputs)]
        case _:
            return []


def _with_part(item: Item, old: MessagePart, new: Any) -> Item:
    match item:
        case MessageItem(content=list(parts)):
            return replace(item, content=[new if part is old else part for part in parts])
        case FunctionOutputItem(output=list(outputs)):
            return replace(item, output=[new if part is old else part for part in outputs])
        case _:
            return item


def _is_inline(part: ContentPart) -> TypeGuard[MediaContent]:
    return not isinstance(part, TextPart) and part.url.startswith("data:")


def image_of(url: str, field: str) -> bytes | str:
    """Return the file in a `data:` URL, or the `media:` URL of a stored file.

    Raises InvalidRequest or InvalidMedia naming the field.
    """
    if url.startswith("data:"):
        return decode_data(url, field)
    name = media_store.parse_media_url(url)
    if name is None:
        raise InvalidRequest(f"{field}: not a stored file or a data: URL", field=field)
    return media_store.media_url(name)


def decode_data(url: str, field: str) -> bytes:
    """Return the content of a data: URL. Raises InvalidMedia naming the field."""
    head, comma, data = url.partition(",")
    if f"{head}{comma}".lower().encode() == SEQUENCE_HEAD:
        # For a sequence of JPEG files, the URL itself is the file.
        return SEQUENCE_HEAD + data.encode()
    try:
        if head.endswith(";base64"):
            return decode_base64(data)
        complaint = "a data: URL must be base64-encoded"
    except ValueError:
        complaint = "not base64"
    raise InvalidMedia(f"{field}: {complaint}", field=field)
