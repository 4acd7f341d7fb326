"""`/v1/images/generations`, `/v1/images/edits`, and the files of generated images."""

from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import InvalidRequest, MediaTooLarge, NotFound, Unavailable
from shared.protocol.multimodal import IMAGE, MEDIA_SCHEME
from shared.state import media_store
from workers.gateway.app import AppContext
from workers.gateway.backend.uploads import image_of
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import declares_json
from workers.gateway.openai.images import IMAGES, ImageOptions, plan_images
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, Call, RouteTable
from workers.gateway.schemas.images import (
    UNSUPPORTED,
    EditedImage,
    ImageEvent,
    ImagesAnswer,
    ImagesRequest,
    StoredEdit,
)

ROUTES = RouteTable("Images")

FILES = "/v1/images"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADERS = {
    # The name is the hash of the bytes.
    "cache-control": "private, max-age=31536000, immutable",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'",
}


@ROUTES.answer(
    IMAGES,
    f"{FILES}/generations",
    summary="Paint images of a text",
    body=ImagesRequest,
    unsupported=UNSUPPORTED,
    answer=ImagesAnswer,
    chunk=ImageEvent,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def generate(call: Call, body: ImagesRequest) -> SubmitPlan[ImageOptions]:
    painter = call.context.pipelines[body.model].painter
    return plan_images(body, painter, _base_url(call))


class Edit(NamedTuple):
    form: ImagesRequest
    images: Sequence[bytes | str]
    """Files, or `media:` URLs of stored ones."""
    field: str
    """Field of the body that has them."""


async def _read_edit(call: Call) -> Edit:
    """Return the fields and the images. Raises a RequestError that names the wrong field."""
    if declares_json(call.request):
        body = await call.context.bodies.decode(call.request, StoredEdit, UNSUPPORTED)
        images = [_source_of(image, f"images[{i}]") for i, image in enumerate(body.images)]
        edit = Edit(body, images, "images")
    else:
        edit = Edit(*await call.read_form(ImagesRequest, UNSUPPORTED, IMAGE), IMAGE)
    call.context.check_model(edit.form.model)
    return edit


def _source_of(image: EditedImage, field: str) -> bytes | str:
    """Return the file or the `media:` URL of an image. Raises InvalidRequest or InvalidMedia."""
    if (image.file_id is None) == (image.image_url is None):
        raise InvalidRequest(f"{field}: give either file_id or image_url", field=field)
    if image.image_url is None:
        field, url = f"{field}.file_id", f"{MEDIA_SCHEME}{image.file_id}"
    else:
        field, url = f"{field}.image_url", image.image_url
    return image_of(url, field)


@ROUTES.answer(
    IMAGES,
    f"{FILES}/edits",
    summary="Edit images by a text",
    body=ImagesRequest,
    file=IMAGE,
    json_body=StoredEdit,
    read=_read_edit,
    answer=ImagesAnswer,
    chunk=ImageEvent,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def edit(call: Call, body: Edit) -> SubmitPlan[ImageOptions]:
    painter = call.context.pipelines[body.form.model].painter
    urls = [
        media_store.media_url(await media_store.hash_media(image))
        if isinstance(image, bytes)
        else image
        for image in body.images
    ]
    plan = plan_images(body.form, painter, _base_url(call), urls, body.field)
    for image in body.images:
        if isinstance(image, bytes):
            await call.context.pin_media(image, call.caller.tenant)
    return plan


def _base_url(call: Call) -> str:
    base = call.context.config.gateway.public_url or str(call.request.base_url)
    return f"{base.rstrip('/')}{FILES}/"


@ROUTES.endpoint(
    "GET",
    f"{FILES}/{{name}}",
    "The file of an image, by the name in its URL",
    answer="image/png",
    refuses=(MediaTooLarge, NotFound, Unavailable),
)
async def send_file(context: AppContext, request: Request, caller: Caller) -> Response:
    media = media_store.media_url(request.path_params["name"])
    data = b""
    if media_store.parse_media_url(media) is not None:
        data = await client.find_media(context.bus, media, caller.tenant) or b""
    # Other files of the tenant must not be opened in a browser.
    if not data.startswith(PNG_SIGNATURE):
        raise NotFound("there is no image of this name")
    return Response(data, headers=HEADERS, media_type="image/png")
