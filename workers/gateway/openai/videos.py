"""`/v1/videos`: the plan of a request, and the description of a video. Pure."""

from typing import NamedTuple

from shared.errors import InvalidRequest
from shared.protocol.images import PaintParams
from shared.protocol.messages import VideoJob
from shared.protocol.pipeline import StageSpec
from shared.protocol.records import ErrorInfo, VideoRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.videos import VideoParams, VideoSpec, check_frames, resolve_video
from workers.gateway.core.assembler import AnswerOptions, OutputOptions
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind, Budget, Refusal
from workers.gateway.core.log_answer import LogAssembler
from workers.gateway.core.plan import Delivery, SubmitPlan
from workers.gateway.schemas.videos import Status, VideoBody, VideoError, VideoRequest


class VideoOptions(AnswerOptions, frozen=True, kw_only=True):
    video: OutputOptions

    @property
    def output(self) -> OutputOptions:
        return self.video


VIDEOS = AnswerKind(
    name="videos",
    id_prefix="vid",
    options=VideoOptions,
    assembler=LogAssembler[VideoOptions],
    client_fields=ClientFields(
        {
            "video.size": "size",
            "video.frames": "frames",
            "video.steps": "steps",
            "video.guidance": "guidance",
            "video.negative_prompt": "negative_prompt",
            "outputs": "model",
        }
    ),
    budget=Budget(output=Refusal("records", "id", "a stream has no limit")),
)


class VideoPlan(NamedTuple):
    """Plan of a request, and its parameters with all defaults resolved."""

    submit: SubmitPlan[VideoOptions]
    params: PaintParams
    output: str
    """Name of the output with the video."""


def plan_video(request: VideoRequest, maker: StageSpec | None, max_timeout_s: float) -> VideoPlan:
    """Return the plan of a request. Raises InvalidRequest naming the field."""
    if maker is None or maker.output is None or maker.video is None:
        raise InvalidRequest(f"{request.model} makes no videos", field="model")
    if request.timeout_s is not None and request.timeout_s > max_timeout_s:
        raise InvalidRequest(
            f"timeout_s: {request.timeout_s:g} is over the limit of {max_timeout_s:g}",
            field="timeout_s",
        )
    params = VideoParams(
        request.size,
        _frames_of(request, maker.video, maker.sampling_defaults.get("fps")),
        request.fps,
        request.steps,
        request.guidance,
        request.negative_prompt,
        request.seed,
    )
    with VIDEOS.client_fields.translated(checks=True):
        resolved = resolve_video(
            params, maker.sampling_defaults, maker.sizes, maker.video, maker.size_rule
        )
    output = maker.output.name
    generate_request = GenerateRequest(
        request.model,
        prompt=request.prompt,
        video=params,
        outputs=[output],
        timeout_s=request.timeout_s or max_timeout_s,
    )
    options = VideoOptions(video=OutputOptions(output=output, format="mp4"))
    # The events are not sent, but no memory is reserved for an answer.
    submit = SubmitPlan([generate_request], {}, options, delivery=Delivery.EVENTS, durable=True)
    return VideoPlan(submit, resolved, output)


def _frames_of(request: VideoRequest, spec: VideoSpec, default_fps: int | None) -> int | None:
    """Return the number of frames that a request names, by itself or as a duration."""
    if request.seconds is None:
        return request.frames
    fps = request.fps or default_fps or spec.fps
    frames = spec.multiple * round(float(request.seconds) * fps / spec.multiple) + 1
    if request.frames not in (None, frames):
        raise InvalidRequest(
            f"frames: {request.frames} contradicts seconds, which are {frames} frames: send one of"
            " them",
            field="frames",
        )
    check_frames(frames, spec, "seconds")
    return frames


class VideoState(NamedTuple):
    """State of an ordered video."""

    job: VideoJob
    status: Status
    expires_s: int
    progress: int = 0
    record: VideoRecord | None = None
    """Record of the file, if the video is complete."""
    completed_s: int | None = None
    error: ErrorInfo | None = None


def video_body(video_id: str, state: VideoState) -> VideoBody:
    job, error = state.job, state.error
    if error is not None:
        error = VIDEOS.client_fields.translate(error)
    return VideoBody(
        id=video_id,
        model=job.model,
        status=state.status,
        progress=state.progress,
        created_at=job.created_s,
        completed_at=state.completed_s,
        expires_at=state.expires_s,
        prompt=job.prompt,
        size=job.size,
        seconds=f"{(job.frames - 1) / job.fps:.3g}",
        frames=job.frames,
        fps=job.fps,
        seed=None if state.record is None else state.record.seed,
        error=None if error is None else VideoError(error.code, error.message, error.field),
    )
