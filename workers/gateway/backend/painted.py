"""The images of a request, whole or as events while they sharpen."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from msgspec.structs import replace

from shared import client
from shared.bus.bus import Bus
from shared.protocol.encoding import to_json
from shared.protocol.records import AnyRecord, Failure, ImageRecord, OutputEnd, StepState
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext
from workers.gateway.backend.active_request import merge_logs
from workers.gateway.http.errors import RequestFailed
from workers.gateway.http.sse import event
from workers.gateway.schemas.images import ImageEvent, usage_of

# Names of fields on the bus → those of the endpoint.
_FIELDS = {
    "image.size": "size",
    "image.n": "n",
    "image.steps": "num_inference_steps",
    "image.guidance": "guidance_scale",
    "image.negative_prompt": "negative_prompt",
    "prompt": "prompt",
    "timeout_s": "timeout_s",
}


async def follow_images(
    bus: Bus, request: GenerateRequest, output: str, tenant: str
) -> AsyncGenerator[StepState | ImageRecord | OutputEnd, None]:
    """Publish a request, and yield the records of its images. Raises RequestFailed."""
    request_id = request.request_id or client.new_request_id()
    logs: list[AsyncIterator[AnyRecord]] = [
        client.ask(bus, request, request_id, tenant),
        client.follow_output(bus, request_id, output, timeout_s=request.timeout_s),
    ]
    async with aclosing(merge_logs(logs)) as records:
        async for _, record in records:
            match record:
                case Failure(error=error):
                    field = _FIELDS.get(error.field or "")
                    message = error.message
                    if field is not None and error.field is not None:
                        message = message.replace(f"{error.field}:", f"{field}:", 1)
                    raise RequestFailed(replace(error, field=field, message=message), "")
                case StepState() | ImageRecord():
                    yield record
                case OutputEnd(cut=False):
                    yield record
                    return


async def collect_images(
    context: AppContext, request: GenerateRequest, output: str, tenant: str
) -> tuple[list[str], float]:
    """Return the `media:` URLs of a request's images, and the tokens of its prompt."""
    found: dict[int, str] = {}
    prompt_tokens = 0.0
    async with aclosing(follow_images(context.bus, request, output, tenant)) as records:
        async for record in records:
            if isinstance(record, ImageRecord):
                found[record.number] = record.media
            elif isinstance(record, OutputEnd):
                prompt_tokens = record.summary.units.get("prompt_tokens", 0.0)
    return [found[number] for number in sorted(found)], prompt_tokens


async def image_events(
    context: AppContext, request: GenerateRequest, output: str, size: str, tenant: str
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a request for one image: its previews, and the image itself."""
    created, num_previews, finished = int(context.now_s), 0, ""
    async with aclosing(follow_images(context.bus, request, output, tenant)) as records:
        async for record in records:
            match record:
                case StepState(preview=preview) if preview:
                    data = await encoded(context.bus, preview, tenant)
                    partial = ImageEvent(
                        type="image_generation.partial_image",
                        b64_json=data,
                        created_at=created,
                        size=size,
                        partial_image_index=num_previews,
                    )
                    num_previews += 1
                    yield _named(partial)
                case ImageRecord(media=media):
                    finished = await encoded(context.bus, media, tenant)
                case OutputEnd(summary=summary):
                    usage = usage_of(summary.units.get("prompt_tokens", 0.0))
                    yield _named(
                        ImageEvent(
                            type="image_generation.completed",
                            b64_json=finished,
                            created_at=created,
                            size=size,
                            usage=usage,
                        )
                    )


async def encoded(bus: Bus, media: str, tenant: str) -> str:
    """Return a stored image in base64. Raises Unavailable for one that is gone."""
    return base64.b64encode(await client.read_media(bus, media, tenant)).decode()


def _named(about: ImageEvent) -> bytes:
    return f"event: {about.type}\n".encode() + event(to_json(about))
