"""Files that are too large for a message: stored as media, and referred to by a `media:` URL."""

import asyncio
import base64
from collections.abc import Sequence
from typing import TypeGuard

from msgspec.structs import replace

from shared import client
from shared.errors import InvalidMedia
from shared.protocol.items import FunctionOutputItem, InputImagePart, Item, MessageItem
from shared.protocol.requests import (
    SEQUENCE_HEAD,
    AudioPart,
    ContentPart,
    GenerateRequest,
    ImagePart,
    MediaContent,
    TextPart,
    VideoPart,
)
from workers.gateway.app import AppContext

# Lengths of data: URLs. A message has room for 8 MiB, so each of many images may use less of it.
MAX_INLINE = 256 * 2**10
MAX_INLINE_TOGETHER = 2 * 2**20
MAX_INLINE_OF_MANY = 8 * 2**10


async def store_large_images(
    context: AppContext, request: GenerateRequest, tenant: str
) -> GenerateRequest:
    """Return the request with `media:` URLs in place of large `data:` URLs.

    Raises InvalidMedia with the field, or Unavailable.
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
        data = await asyncio.to_thread(_decode_data, part.url, f"{field}.{part.url_field}")
        stored = await client.pin_media(context.bus, data, tenant)
        match part:
            case ImagePart():
                return ImagePart(replace(part.image_url, url=stored))
            case VideoPart():
                return VideoPart(replace(part.video_url, url=stored))
            case AudioPart():
                return AudioPart(replace(part.audio_url, url=stored))

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


async def store_large_item_images(
    context: AppContext, items: Sequence[Item], tenant: str
) -> list[Item]:
    """Return the items of a response with `media:` URLs in place of large `data:` URLs.

    Raises InvalidMedia with the field, or Unavailable.
    """
    inline = [part.image_url or "" for item in items for _, part in _image_parts(item)]
    lengths = [len(url) for url in inline if url.startswith("data:")]
    limit = MAX_INLINE if sum(lengths) <= MAX_INLINE_TOGETHER else MAX_INLINE_OF_MANY
    stored: list[Item] = []
    for i, item in enumerate(items):
        for field, part in _image_parts(item):
            url = part.image_url or ""
            if url.startswith("data:") and len(url) > limit:
                data = await asyncio.to_thread(_decode_data, url, f"input[{i}].{field}")
                name = await client.pin_media(context.bus, data, tenant)
                item = _with_image(item, part, replace(part, image_url=name))
        stored.append(item)
    return stored


def _image_parts(item: Item) -> list[tuple[str, InputImagePart]]:
    """Return an item's images, each with the name of the field that holds its URL."""
    match item:
        case MessageItem(content=list(parts)):
            name = "content"
        case FunctionOutputItem(output=list(parts)):
            name = "output"
        case _:
            return []
    return [
        (f"{name}[{j}].image_url", part)
        for j, part in enumerate(parts)
        if isinstance(part, InputImagePart)
    ]


def _with_image(item: Item, old: InputImagePart, new: InputImagePart) -> Item:
    match item:
        case MessageItem(content=list(parts)):
            return replace(item, content=[new if part is old else part for part in parts])
        case FunctionOutputItem(output=list(outputs)):
            return replace(item, output=[new if part is old else part for part in outputs])
        case _:
            return item


def _is_inline(part: ContentPart) -> TypeGuard[MediaContent]:
    return not isinstance(part, TextPart) and part.url.startswith("data:")


def _decode_data(url: str, field: str) -> bytes:
    """Return the content of a data: URL. Raises InvalidMedia with the field."""
    head, comma, data = url.partition(",")
    if f"{head}{comma}".lower().encode() == SEQUENCE_HEAD:
        # The URL of a sequence of JPEG files is its file.
        return SEQUENCE_HEAD + data.encode()
    try:
        if head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
        complaint = "a data: URL must be base64-encoded"
    except ValueError:
        complaint = "not base64"
    raise InvalidMedia(f"{field}: {complaint}", field=field)
