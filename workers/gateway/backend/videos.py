"""Operations on videos: order, find, list, read and delete them.

A video is a durable request. Its state is in the request's logs, and a small message has what the
logs do not have. The list of a tenant's videos is read from these messages.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

from msgspec.structs import replace
from starlette.requests import Request

from shared import client
from shared.bus.reading import StoredMessage
from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import InvalidRequest, NotFound, PagemillError
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import VideoJob, decode_video_job
from shared.protocol.records import Failure, Finish, StepState, VideoRecord
from shared.protocol.requests import tenant_header
from shared.state import media_store, request_status
from shared.state.log_records import records_of
from shared.state.media_store import StoredFile
from shared.state.token_log import last_of_output, last_record
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import accept
from workers.gateway.core.byte_ranges import ByteRange
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.openai.videos import VIDEOS, VideoPlan, VideoState

PAGE_BYTES = 2**20


class Video(NamedTuple):
    """An ordered video of a tenant."""

    id: str
    """Id of the request, without its tenant."""
    tenant: str
    job: VideoJob

    @property
    def bus_id(self) -> str:
        return names.scoped_id(self.id, self.tenant)


async def order(context: AppContext, request: Request, caller: Caller, plan: VideoPlan) -> Video:
    """Publish the request of a video. Raises what `accept` raises."""
    active = await accept(context, request, caller, VIDEOS, plan.submit)
    (generate,), params, record = plan.submit.requests, plan.params, active.record
    assert params.frames is not None
    assert params.fps is not None
    job = VideoJob(
        record.model,
        generate.prompt or "",
        plan.output,
        params.size,
        params.frames,
        params.fps,
        record.created_s,
        record.timeout_s,
    )
    subject = subjects.video_job(record.tenant, active.request_id)
    try:
        headers = tenant_header(record.tenant)
        await context.bus.publish_without_id(subject, to_json(job), headers)
    except PagemillError:
        active.start_cancel()  # Its client does not learn the id.
        raise
    return Video(active.request_id, record.tenant, job)


async def find(context: AppContext, caller: Caller, video_id: str) -> Video:
    """Return a video. Raises NotFound, also for a video of another tenant."""
    stored = await _read(context, caller.tenant, video_id)
    video = None if stored is None else _video_of(context, stored, caller.tenant)
    if video is None:
        raise NotFound(
            f"there is no video {video_id!r}, or it is deleted or has expired", field="id"
        )
    return video


async def iterate(
    context: AppContext, tenant: str, after: str | None, *, newest_first: bool
) -> AsyncIterator[Video]:
    """Yield the videos of a tenant in the order of their creation, which are read as they are used.

    With `after`, the list begins after this video. Raises NotFound if there is no such video.
    """
    position = None
    if after is not None:
        stored = await _read(context, tenant, after)
        if stored is None:
            raise NotFound(f"the list has no {after!r}", field="after")
        position = stored.sequence
    stream, subject = subjects.MEDIA_STREAM, subjects.video_job(tenant, "*")
    messages = (
        context.bus.read_backwards(stream, subject, position)
        if newest_first
        else context.bus.read_forwards(stream, subject, 1 if position is None else position + 1)
    )
    async for message in messages:
        if (video := _video_of(context, message, tenant)) is not None:
            yield video


async def state_of(context: AppContext, video: Video) -> VideoState:
    """Return the state of a video. Raises Unavailable."""
    job = video.job
    state = VideoState(job, "queued", _expires_s(context, job))
    last = await last_record(context.bus, video.bus_id)
    if isinstance(last, Finish):
        completed_s = int(max((span.sent_ms for span in last.path), default=0.0) / 1000)
        file = await _record_of(context, video)
        return state._replace(
            status="completed", progress=100, record=file, completed_s=completed_s
        )
    if isinstance(last, Failure):
        return state._replace(status="failed", error=last.error)
    record = await last_of_output(context.bus, video.bus_id, job.output)
    if record is not None:
        progress = 100
        if isinstance(record, StepState):
            progress = 100 * record.step // record.steps
        return state._replace(status="in_progress", progress=progress)
    status = await request_status.find(context.bus, video.bus_id)
    if status.state == "running":
        return state._replace(status="in_progress")
    return state


async def find_file(context: AppContext, video: Video) -> StoredFile:
    """Return the file of a video.

    Raises RequestFailed for a video that has failed, InvalidRequest for an unfinished one, and
    NotFound if its file is not stored any more.
    """
    state = await state_of(context, video)
    if state.error is not None:
        raise errors.RequestFailed(VIDEOS.client_fields.translate(state.error), "")
    if state.status != "completed":
        raise InvalidRequest(f"the video is not complete: it is {state.status}", field="id")
    file = await _stored_file(context, video, state.record)
    if file is None:
        raise NotFound("the file of this video is not stored any more", field="id")
    return file


async def read_file(
    context: AppContext, file: StoredFile, tenant: str, part: ByteRange
) -> AsyncIterator[bytes]:
    """Yield a part of a file. Raises NotFound if the file is removed meanwhile."""
    position, end = part.first, part.last + 1
    while position < end:
        num_bytes = min(PAGE_BYTES, end - position)
        page = await media_store.read_page(context.bus, file.name, position, num_bytes, tenant)
        if page is None:
            raise NotFound("the file was removed while it was sent")
        yield page.data
        position = page.next


async def delete(context: AppContext, video: Video) -> None:
    """Remove a video with its file and its logs; one that has not ended is cancelled first."""
    bus = context.bus
    if not isinstance(await last_record(bus, video.bus_id), Finish | Failure):
        await client.cancel(bus, video.bus_id)
    record = await _record_of(context, video)
    file = await _stored_file(context, video, record)
    if record is not None and file is not None and not await _is_shared(context, video, record):
        await media_store.remove(bus, file, video.tenant)
    for log in (subjects.tokens(video.bus_id), subjects.logs_beside_text(video.bus_id)):
        await bus.purge(subjects.TOKENS_STREAM, log)
    await bus.purge(subjects.MEDIA_STREAM, subjects.video_job(video.tenant, video.id))


async def _is_shared(context: AppContext, video: Video, file: VideoRecord) -> bool:
    """Return whether another video of the tenant has the same file, as videos with one seed do."""
    job = video.job
    async for other in iterate(context, video.tenant, None, newest_first=True):
        same = replace(other.job, created_s=job.created_s, timeout_s=job.timeout_s) == job
        if same and other.id != video.id:
            record = await _record_of(context, other)
            if record is not None and record.media == file.media:
                return True
    return False


async def _read(context: AppContext, tenant: str, video_id: str) -> StoredMessage | None:
    if not names.is_own_id(video_id):
        return None
    subject = subjects.video_job(tenant, video_id)
    return await context.bus.read_last(subjects.MEDIA_STREAM, subject)


def _video_of(context: AppContext, stored: StoredMessage, tenant: str) -> Video | None:
    """Return the video of a message; None if it has expired, or cannot be read."""
    job = decode_video_job(stored.data)
    if job is None or context.now_s >= _expires_s(context, job):
        return None
    return Video(subjects.last_token(stored.subject), tenant, job)


def _expires_s(context: AppContext, job: VideoJob) -> int:
    """Return the time until which the logs and the file of a video are stored at least."""
    config = context.config.delivery
    life_s = min(config.token_log_age_s, config.max_timeout_s + MEDIA_REUSE_S)
    return job.created_s + int(life_s)


async def _record_of(context: AppContext, video: Video) -> VideoRecord | None:
    log = subjects.tokens(video.bus_id, video.job.output)
    records = records_of(await context.bus.read(subjects.TOKENS_STREAM, log), 0)
    return next((record for record in records if isinstance(record, VideoRecord)), None)


async def _stored_file(
    context: AppContext, video: Video, record: VideoRecord | None
) -> StoredFile | None:
    name = None if record is None else media_store.parse_media_url(record.media)
    return None if name is None else await media_store.look_up(context.bus, name, video.tenant)
