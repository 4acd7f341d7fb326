"""`/v1/videos`: videos, which are made in the background and stored for some time."""

import asyncio
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.helpers.taking import take
from workers.gateway.app import AppContext, Json
from workers.gateway.backend import videos
from workers.gateway.core.byte_ranges import ByteRange, read_range
from workers.gateway.core.ids import read_request_id
from workers.gateway.core.pages import limit_of
from workers.gateway.core.plan import check_choice
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import declares_json
from workers.gateway.openai.videos import VIDEOS, plan_video, video_body
from workers.gateway.route_table import ANSWER_ERRORS, ID_PARAMETERS, Call, Parameter, RouteTable
from workers.gateway.schemas.videos import (
    MP4,
    UNSUPPORTED,
    DeletedVideo,
    VideoBody,
    VideoList,
    VideoRequest,
)

ROUTES = RouteTable("Videos")
ROUTES.kinds.append(VIDEOS)
PATH = "/v1/videos"
MAX_PAGE, DEFAULT_PAGE = 100, 20


@ROUTES.endpoint(
    "POST",
    PATH,
    "Make a video of a text, in the background; the body may also be a form with the same fields",
    answer=VideoBody,
    body=VideoRequest,
    refuses=ANSWER_ERRORS,
    parameters=ID_PARAMETERS,
    counted=True,
)
async def create(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, VIDEOS)
    if declares_json(request):
        body = await context.bodies.decode(request, VideoRequest, UNSUPPORTED)
    else:
        call = Call(context, request, caller, VIDEOS.client_fields)
        body, _ = await call.read_form(VideoRequest, UNSUPPORTED)
    context.check_model(body.model)
    maker = context.pipelines[body.model].video_maker
    plan = plan_video(body, maker, context.config.delivery.max_timeout_s)
    video = await videos.order(context, request, caller, plan)
    return Json(await _describe(context, video), headers={"x-request-id": video.id})


@ROUTES.endpoint(
    "GET",
    PATH,
    "The videos of a tenant, the newest first",
    answer=VideoList,
    refuses=(InvalidRequest, NotFound, Unavailable),
    parameters=(
        Parameter("after", "query", "Id of the last video of the page before"),
        Parameter(
            "limit",
            "query",
            f"1 to {MAX_PAGE}, by default {DEFAULT_PAGE}",
            Annotated[int, Meta(ge=1, le=MAX_PAGE)],
        ),
        Parameter("order", "query", "`desc`, the default, or `asc`", Literal["asc", "desc"]),
    ),
)
async def list_videos(context: AppContext, request: Request, caller: Caller) -> Response:
    query = request.query_params
    limit, order = limit_of(query, DEFAULT_PAGE, MAX_PAGE), query.get("order", "desc")
    check_choice("order", order, ["desc", "asc"])
    listing = videos.iterate(
        context, caller.tenant, query.get("after"), newest_first=order == "desc"
    )
    page = await take(listing, limit + 1)
    data = await asyncio.gather(*(_describe(context, video) for video in page[:limit]))
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return Json(
        VideoList(data=data, first_id=first_id, last_id=last_id, has_more=len(page) > limit)
    )


@ROUTES.endpoint(
    "GET",
    f"{PATH}/{{id}}",
    "The state of a video",
    answer=VideoBody,
    refuses=(NotFound, Unavailable),
)
async def show(context: AppContext, request: Request, caller: Caller) -> Response:
    video = await videos.find(context, caller, request.path_params["id"])
    return Json(await _describe(context, video))


@ROUTES.endpoint(
    "GET",
    f"{PATH}/{{id}}/content",
    "The file of a video, or a range of its bytes",
    answer=MP4,
    refuses=(InvalidRequest, NotFound, errors.RangeNotSatisfiable, *ANSWER_ERRORS),
    parameters=(
        Parameter("variant", "query", "`video`, the default", Literal["video"]),
        Parameter("Range", "header", "One range, such as `bytes=1000-`"),
        Parameter("If-Range", "header", "The ETag of the file. Any other ETag returns the whole"),
    ),
    statuses=(200, 206),
)
async def send_content(context: AppContext, request: Request, caller: Caller) -> Response:
    check_choice("variant", request.query_params.get("variant", "video"), ["video"])
    video = await videos.find(context, caller, request.path_params["id"])
    file = await videos.find_file(context, video)
    num_bytes, etag = file.head.num_bytes, f'"{file.name}"'
    header, is_same = (
        request.headers.get("range", ""),
        request.headers.get("if-range", etag) == etag,
    )
    part = read_range(header, num_bytes) if is_same else None
    byte_range = part or ByteRange(0, num_bytes - 1, num_bytes)
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(byte_range.num_bytes),
        "content-disposition": f'attachment; filename="{video.id}.mp4"',
        "etag": etag,
        "x-content-type-options": "nosniff",
    }
    if part is not None:
        headers["content-range"] = part.header
    return StreamingResponse(
        videos.read_file(context, file, video.tenant, byte_range),
        200 if part is None else 206,
        headers,
        media_type=MP4,
    )


@ROUTES.endpoint(
    "DELETE",
    f"{PATH}/{{id}}",
    "Delete a video with its file; one that is not complete is cancelled first",
    answer=DeletedVideo,
    refuses=(NotFound, Unavailable),
)
async def delete(context: AppContext, request: Request, caller: Caller) -> Response:
    video = await videos.find(context, caller, request.path_params["id"])
    await videos.delete(context, video)
    return Json(DeletedVideo(id=video.id))


async def _describe(context: AppContext, video: videos.Video) -> VideoBody:
    return video_body(video.id, await videos.state_of(context, video))
