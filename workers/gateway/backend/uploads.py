"""Images that are too large for a message: stored as media, and referred to by a `media:` URL."""

import base64
from typing import TypeGuard

from msgspec.structs import replace

from shared import client
from shared.errors import InvalidMedia
from shared.protocol.requests import ContentPart, GenerateRequest, ImagePart, ImageURL
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
        stored = await client.pin_media(context.bus, _decode_data(part.url, field), tenant)
        return ImagePart(ImageURL(stored, part.image_url.detail))

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


def _is_inline(part: ContentPart) -> TypeGuard[ImagePart]:
    return isinstance(part, ImagePart) and part.url.startswith("data:")


def _decode_data(url: str, field: str) -> bytes:
    """Return the content of a data: URL. Raises InvalidMedia with the field."""
    head, _, data = url.partition(",")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
        complaint = "a data: URL must be base64-encoded"
    except ValueError:
        complaint = "not base64"
    raise InvalidMedia(f"{field}: {complaint}", field=f"{field}.image_url.url")
