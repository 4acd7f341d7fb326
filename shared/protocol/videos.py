"""Parameters of videos. Their ranges are part of their types and schemas. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.images import (
    Guidance,
    ImageSize,
    NegativePrompt,
    NumSteps,
    PaintParams,
    Seed,
    SizeRule,
    resolve_params,
)

MAX_FPS = 60
NumFrames = Annotated[int, Meta(ge=1, le=10_000)]
FrameRate = Annotated[int, Meta(ge=1, le=MAX_FPS)]


class VideoSpec(NamedTuple):
    """Lengths of the videos that a stage makes."""

    frames: int
    """Default number of frames."""
    fps: int
    """Default number of frames per second."""
    multiple: int
    """Each number of frames is 1 more than a multiple of this."""
    max_frames: int
    """Limit on the frames of a video, which bounds the memory for it."""


class VideoParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's video. Omitted fields have the defaults of the stage."""

    size: ImageSize | None = None
    """Width and height in pixels; by default the first size of the stage."""
    frames: NumFrames | None = None
    """Number of frames; by default as the model was trained."""
    fps: FrameRate | None = None
    """Frames per second of the file; by default as the model was trained."""
    steps: NumSteps | None = None
    """Denoising steps; by default as configured."""
    guidance: Guidance | None = None
    """Scale of the classifier-free guidance; by default as configured. 1 disables it, which halves
    the work."""
    negative_prompt: NegativePrompt | None = None
    """Description of what the video must not show; only with a guidance other than 1."""
    seed: Seed | None = None
    """Seed of the noise. By default the seed is derived from the request id, so that a resumed
    request continues as it began."""


def resolve_video(
    requested: VideoParams | None,
    defaults: Mapping[str, Any],
    sizes: Sequence[str],
    spec: VideoSpec,
    rule: SizeRule | None = None,
) -> PaintParams:
    """Return the parameters of a request for a stage with these defaults, sizes and lengths.

    `rule` allows further sizes.

    Raises InvalidRequest for a size or a number of frames that the stage does not make, and for a
    negative prompt without effect.
    """
    params = resolve_params("video.", requested, {"size": sizes[0], **defaults}, sizes, rule)
    frames = spec.frames if params.frames is None else params.frames
    check_frames(frames, spec, "video.frames")
    return replace(params, frames=frames, fps=params.fps or spec.fps)


def check_frames(frames: int, spec: VideoSpec, field: str) -> None:
    """Raise InvalidRequest, which names `field`, for frames that a stage cannot make."""
    if frames > spec.max_frames:
        message = f"{frames} frames are over the model's limit of {spec.max_frames}"
    elif (frames - 1) % spec.multiple:
        lower = frames - (frames - 1) % spec.multiple
        message = (
            f"a video has 1 frame more than a multiple of {spec.multiple}, such as {lower} or"
            f" {lower + spec.multiple}, not {frames}"
        )
    else:
        return
    raise InvalidRequest(f"{field}: {message}", field=field)
