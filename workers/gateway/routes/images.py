"""`/v1/images/generations`, and the files of its images."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.protocol.images import ImageParams
from shared.protocol.pipeline import StageSpec
from shared.protocol.requests import GenerateRequest
from shared.state import media_store
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend.painted import collect_images, encoded, image_events
from workers.gateway.core.choices import check_choice
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream, run_until_disconnect
from workers.gateway.route_table import ANSWER_ERRORS, RouteTable
from workers.gateway.schemas.images import (
    AUTO,
    B64_JSON,
    PNG,
    UNSUPPORTED,
    URL,
    ImageEntry,
    ImageEvent,
    ImagesAnswer,
    ImagesRequest,
    usage_of,
)

ROUTES = RouteTable("Images")

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADERS = {
    # The name is the hash of the bytes.
    "cache-control": "private, max-age=31536000, immutable",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'",
}


@ROUTES.endpoint(
    "POST",
    "/v1/images/generations",
    "Paint images of a text",
    answer=ImagesAnswer,
    body=ImagesRequest,
    chunk=ImageEvent,
    refuses=ANSWER_ERRORS,
    counted=True,
)
async def generate(context: AppContext, request: Request, caller: Caller) -> Response:
    if context.shutting_down.is_set():
        raise Unavailable("the gateway is being stopped")
    request_id = client.new_request_id()
    request.scope["request_id"] = request_id, True
    asked = await context.bodies.decode(request, ImagesRequest, UNSUPPORTED)
    context.check_model(asked.model)
    painter = context.pipelines[asked.model].painter
    if painter is None or painter.output is None:
        raise InvalidRequest(f"{asked.model} paints no images", field="model")
    _check(asked, painter)
    context.bodies.release(request)
    wanted, output = _request_of(context, asked, painter, request_id), painter.output.name
    headers = {"x-request-id": request_id, "pagemill-request-id": request_id}

    def cancel() -> None:
        context.background.start(client.cancel(context.bus, request_id))

    if asked.stream:
        size = _size_of(wanted, painter)
        events = image_events(context, wanted, output, size, caller.tenant)
        return EventStream(events, cancel, context.shutting_down, error_response, headers)
    working = _answer(context, request, asked, wanted, painter, caller.tenant)
    answer = await run_until_disconnect(request.receive, working, cancel, context.shutting_down)
    return Json(answer, headers=headers)


@ROUTES.endpoint(
    "GET",
    "/v1/images/{name}",
    "The file of an image, by the name in its URL",
    answer="image/png",
    refuses=(NotFound, Unavailable),
)
async def send_file(context: AppContext, request: Request, caller: Caller) -> Response:
    media = media_store.media_url(request.path_params["name"])
    data = b""
    if media_store.parse_media_url(media) is not None:
        data = await client.find_media(context.bus, media, caller.tenant) or b""
    # Other files of the tenant are not for browsers.
    if not data.startswith(PNG_SIGNATURE):
        raise NotFound("there is no image of this name")
    return Response(data, headers=HEADERS, media_type="image/png")


def _check(asked: ImagesRequest, painter: StageSpec) -> None:
    """Raise InvalidRequest for what the model, or this endpoint, does not paint."""
    if asked.size not in (None, AUTO):
        check_choice("size", str(asked.size), painter.sizes)
    check_choice("output_format", asked.output_format, [PNG])
    check_choice("response_format", asked.response_format, [B64_JSON, URL])
    if asked.stream:
        check_choice("response_format", asked.response_format, [B64_JSON])
        if (asked.n or 1) > 1:
            raise InvalidRequest(f"n: a stream has one image, not {asked.n}", field="n")
    elif asked.partial_images:
        raise InvalidRequest("partial_images: previews require stream", field="partial_images")


def _request_of(
    context: AppContext, asked: ImagesRequest, painter: StageSpec, request_id: str
) -> GenerateRequest:
    assert painter.output is not None
    params = ImageParams(
        None if asked.size == AUTO else asked.size,
        # A stream has one image, whatever number is configured.
        1 if asked.stream else asked.n,
        asked.num_inference_steps,
        asked.guidance_scale,
        asked.negative_prompt,
        asked.seed,
        asked.partial_images,
    )
    return GenerateRequest(
        asked.model,
        request_id=request_id,
        prompt=asked.prompt,
        image=params,
        outputs=[painter.output.name],
        timeout_s=asked.timeout_s or context.config.delivery.default_timeout_s,
    )


async def _answer(
    context: AppContext,
    request: Request,
    asked: ImagesRequest,
    wanted: GenerateRequest,
    painter: StageSpec,
    tenant: str,
) -> ImagesAnswer:
    created = int(context.now_s)
    found, prompt_tokens = await collect_images(context, wanted, wanted.outputs[0], tenant)
    if asked.response_format == URL:
        base = context.config.gateway.public_url or str(request.base_url)
        names = (media_store.parse_media_url(media) for media in found)
        entries = [ImageEntry(url=f"{base.rstrip('/')}/v1/images/{name}") for name in names]
    else:
        files = await asyncio.gather(*(encoded(context.bus, media, tenant) for media in found))
        entries = [ImageEntry(b64_json=data) for data in files]
    return ImagesAnswer(created, entries, _size_of(wanted, painter), usage_of(prompt_tokens))


def _size_of(wanted: GenerateRequest, painter: StageSpec) -> str:
    assert wanted.image is not None
    return wanted.image.size or str(painter.sampling_defaults.get("size", painter.sizes[0]))
