"""Request and response bodies of OpenAI's videos. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.helpers import patterns
from shared.protocol.images import Guidance, NegativePrompt, NumSteps, Seed
from shared.protocol.videos import FrameRate, NumFrames

UNSUPPORTED = frozenset({"characters", "input_reference"})
MP4 = "video/mp4"

Status = Literal["queued", "in_progress", "completed", "failed"]
Seconds = Annotated[str, Meta(pattern=patterns.SECONDS)]


class VideoRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    """Description of the video."""
    seconds: Seconds | Annotated[float, Meta(ge=0, le=9999)] | None = None
    """Duration, which is rounded to a length that the model supports; by default the length that
    the model was trained with."""
    size: str | None = None
    """One of the model's sizes, such as `832x480`; by default its first one."""
    frames: NumFrames | None = None
    """Number of frames, in place of `seconds`."""
    fps: FrameRate | None = None
    """Frames per second; by default as the model was trained. With `seconds`, it changes the number
    of frames, and otherwise the duration."""
    seed: Seed | None = None
    """With the same seed and the same parameters, the bytes of the video are the same."""
    steps: NumSteps | None = None
    """Number of denoising steps; by default as configured for the model."""
    guidance: Guidance | None = None
    """Scale of the classifier-free guidance, 1 for none; by default as configured for the model."""
    negative_prompt: NegativePrompt | None = None
    """Description of content that the video should not have."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the end: by default and at most `delivery.max_timeout_s`."""


class VideoError(Struct, frozen=True):
    code: str
    message: str
    param: str | None = None
    """Field of the request that caused the error."""


class VideoBody(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    status: Status
    progress: int
    """Completed steps at the last stored state, in percent."""
    created_at: int
    """Unix seconds, as all times here."""
    completed_at: int | None = None
    expires_at: int
    """Time from which the video is not stored any more."""
    prompt: str
    size: str
    seconds: str
    """Time from the first to the last frame."""
    frames: int
    fps: int
    seed: int | None = None
    """Seed of a completed video."""
    error: VideoError | None = None
    object: Literal["video"] = "video"


class VideoList(Struct, frozen=True, kw_only=True):
    data: list[VideoBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedVideo(Struct, frozen=True, kw_only=True):
    id: str
    deleted: bool = True
    object: Literal["video.deleted"] = "video.deleted"
