"""Parameters of painted images. Their ranges are part of their types and schemas. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.errors import InvalidRequest
from shared.protocol.sampling import MAX_SEED
from shared.protocol.versions import since

MAX_IMAGES = 10
MAX_STEPS = 200
MAX_PREVIEWS = 8

ImageSize = Annotated[str, Meta(pattern="^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
"""Width and height in pixels, such as `96x96`."""


NumImages = Annotated[int, Meta(ge=1, le=MAX_IMAGES)]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Meta(ge=0.0, le=50.0)]
NegativePrompt = Annotated[str, Meta(max_length=4096)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
NumPreviews = Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)]


class ImageParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's images. Omitted fields have the defaults of the stage."""

    size: ImageSize | None = None
    """Width and height in pixels; by default the first size of the stage."""
    n: NumImages | None = None
    """Number of images; by default 1."""
    steps: NumSteps | None = None
    """Denoising steps of each image; by default 24."""
    guidance: Guidance | None = None
    """Scale of the classifier-free guidance; by default 2.5. 1, and for some models 0, disables it,
    which halves the work."""
    negative_prompt: NegativePrompt | None = None
    """Description of what the images must not show; only with guidance."""
    seed: Seed | None = None
    """Seed of the noise, together with the number of the image. By default the seed is derived from
    the request id, so that a resumed request continues as it began."""
    partial_images: NumPreviews | None = None
    """Number of previews of each image, at equal distances of steps; by default none."""


class PaintParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's images, or of its video, with all defaults resolved."""

    size: ImageSize
    n: NumImages = 1
    steps: NumSteps = 24
    guidance: Guidance = 2.5
    negative_prompt: NegativePrompt = ""
    seed: Seed | None = None
    partial_images: NumPreviews = 0
    frames: Annotated[int | None, since(3)] = None
    """Number of frames of a video; None for images."""
    fps: Annotated[int | None, since(3)] = None
    """Frames per second of a video; None for images."""

    def preview_steps(self) -> set[int]:
        """Numbers of steps after which there is a preview."""
        parts = self.partial_images + 1
        return {self.steps * part // parts for part in range(1, parts)} - {0, self.steps}


def parse_size(size: str) -> tuple[int, int]:
    """Return the width and the height of an ImageSize."""
    width, _, height = size.partition("x")
    return int(width), int(height)


def resolve_image(
    requested: ImageParams | None, defaults: Mapping[str, Any], sizes: Sequence[str]
) -> PaintParams:
    """Return the parameters of a request for a stage with these defaults and sizes.

    Raises InvalidRequest for a size that the stage does not paint.
    """
    return resolve_params("image.", requested, defaults, sizes)


def resolve_params(
    prefix: str, requested: Struct | None, defaults: Mapping[str, Any], sizes: Sequence[str]
) -> PaintParams:
    """Return the parameters of images or videos, which errors name with a prefix.

    Raises as `resolve_image` does.
    """
    values = {} if requested is None else msgspec.to_builtins(requested)
    params = msgspec.convert({"size": sizes[0], **defaults, **values}, PaintParams)
    if params.size not in sizes:
        raise InvalidRequest(
            f"{prefix}size: {params.size!r} is not available; available: {', '.join(sizes)}",
            field=f"{prefix}size",
        )
    return params
