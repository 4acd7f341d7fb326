"""`/v1/images/generations`, and the files of its images."""

from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import MediaTooLarge, NotFound, Unavailable
from shared.state import media_store
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.http.auth import Caller
from workers.gateway.openai.images import IMAGES, plan_images
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, RouteTable
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


@ROUTES.endpoint(
    "POST",
    f"{FILES}/generations",
    "Paint images of a text",
    answer=ImagesAnswer,
    body=ImagesRequest,
    chunk=ImageEvent,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def generate(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, IMAGES, caller.tenant)
    asked = await context.bodies.decode(request, ImagesRequest, UNSUPPORTED)
    context.check_model(asked.model)
    base = context.config.gateway.public_url or str(request.base_url)
    painter = context.pipelines[asked.model].painter
    plan = plan_images(asked, painter, f"{base.rstrip('/')}{FILES}/")
    return await submit(context, request, caller, IMAGES, plan)


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
    # Other files of the tenant are not for browsers.
    if not data.startswith(PNG_SIGNATURE):
        raise NotFound("there is no image of this name")
    return Response(data, headers=HEADERS, media_type="image/png")
