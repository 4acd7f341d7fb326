"""Images that are too large for a message: stored as media, and referred to by a `media:` URL."""

import base64

from msgspec.structs import replace

from shared import client
from shared.errors import InvalidMedia
from shared.protocol.requests import (
    ContentPart,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
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
    if request.messages is None:
        return request
    lengths = [
        len(part.image_url.url)
        for message in request.messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart) and part.image_url.url.startswith("data:")
    ]
    limit = MAX_INLINE if sum(lengths) <= MAX_INLINE_TOGETHER else MAX_INLINE_OF_MANY
    if all(length <= limit for length in lengths):
        return request
    messages = [
        await _store_in_message(context, message, f"messages[{i}]", limit, tenant)
        for i, message in enumerate(request.messages)
    ]
    return replace(request, messages=messages)


async def _store_in_message(
    context: AppContext, message: Message, field: str, limit: int, tenant: str
) -> Message:
    if not isinstance(message.content, list):
        return message
    parts = [
        await _store_part(context, part, f"{field}.content[{i}]", limit, tenant)
        for i, part in enumerate(message.content)
    ]
    return replace(message, content=parts)


async def _store_part(
    context: AppContext, part: ContentPart, field: str, limit: int, tenant: str
) -> ContentPart:
    if not isinstance(part, ImagePart):
        return part
    url = part.image_url.url
    if not url.startswith("data:") or len(url) <= limit:
        return part
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise InvalidMedia(
            f"{field}: a data: URL must be base64-encoded", field=f"{field}.image_url.url"
        )
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidMedia(f"{field}: not base64", field=f"{field}.image_url.url") from None
    stored = await client.pin_media(context.bus, raw, tenant)
    return ImagePart(ImageURL(stored, part.image_url.detail))
