"""`/v1/images/generations`, and the files of generated images."""

from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import MediaTooLarge, NotFound, Unavailable
from shared.state import media_store
from workers.gateway.app import AppContext
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.openai.images import IMAGES, ImageOptions, plan_images
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, Call, RouteTable
from workers.gateway.schemas.images import UNSUPPORTED, ImageEvent, ImagesAnswer, ImagesRequest

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
    base = call.context.config.gateway.public_url or str(call.request.base_url)
    painter = call.context.pipelines[body.model].painter
    return plan_images(body, painter, f"{base.rstrip('/')}{FILES}/")


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
