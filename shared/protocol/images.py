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
MAX_INPUT_IMAGES = 16

AUTO = "auto"
_SIDES = "[1-9][0-9]{0,4}x[1-9][0-9]{0,4}"
ImageSize = Annotated[str, Meta(pattern=f"^{_SIDES}$")]
"""Width and height in pixels, such as `96x96`."""


NumImages = Annotated[int, Meta(ge=1, le=MAX_IMAGES)]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Meta(ge=0.0, le=50.0)]
NegativePrompt = Annotated[str, Meta(max_length=4096)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
NumPreviews = Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)]
InputImages = Annotated[
    tuple[Annotated[str, Meta(pattern="^media:[0-9a-f]{64}$")], ...],
    Meta(max_length=MAX_INPUT_IMAGES),
]


class ImageParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's images. Omitted fields have the defaults of the stage."""

    size: ImageSize | None = None
    """Width and height in pixels; by default the first size of the stage, or of an edited image
    about the aspect ratio of the last image to edit."""
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
    input_images: Annotated[InputImages, since(3)] = ()
    frames: Annotated[int | None, since(3)] = None
    """Number of frames of a video; None for images."""
    fps: Annotated[int | None, since(3)] = None
    """Frames per second of a video; None for images."""
    """`media:` URLs of stored JPEG, PNG or WEBP files: the images to edit, for a model that edits
    images."""


class PaintParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's images, or of its video, with all defaults resolved."""

    size: Annotated[str, Meta(pattern=f"^({AUTO}|{_SIDES})$")]
    """Width and height in pixels, or `auto` for about the aspect ratio of the last image to
    edit."""
    n: NumImages = 1
    steps: NumSteps = 24
    guidance: Guidance = 2.5
    negative_prompt: NegativePrompt = ""
    seed: Seed | None = None
    partial_images: NumPreviews = 0
    input_images: Annotated[InputImages, since(3)] = ()
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


def check_input_images(count: int, limit: int, field: str) -> None:
    """Raise InvalidRequest unless a stage with this limit edits `count` images."""
    if count and not limit:
        raise InvalidRequest(f"{field}: the model edits no images", field=field)
    if limit and not 1 <= count <= limit:
        raise InvalidRequest(f"{field}: {count} images: the limits are 1 and {limit}", field=field)


def resolve_image(
    requested: ImageParams | None,
    defaults: Mapping[str, Any],
    sizes: Sequence[str],
    input_images: int = 0,
) -> PaintParams:
    """Return the parameters of a request for a stage with these defaults and sizes.

    `input_images` is the stage's limit on images to edit. Raises InvalidRequest for a size that the
    stage does not paint, for images that it does not edit, and if it edits images and there are
    none.
    """
    size = AUTO if input_images else sizes[0]
    params = resolve_params("image.", requested, {"size": size, **defaults}, [size, *sizes])
    check_input_images(len(params.input_images), input_images, "image.input_images")
    return params


def resolve_params(
    prefix: str, requested: Struct | None, defaults: Mapping[str, Any], sizes: Sequence[str]
) -> PaintParams:
    """Return the parameters of images or videos, which errors name with a prefix.

    Raises InvalidRequest for another size.
    """
    values = {} if requested is None else msgspec.to_builtins(requested)
    params = msgspec.convert({**defaults, **values}, PaintParams)
    if params.size not in sizes:
        available = ", ".join(dict.fromkeys(sizes))
        raise InvalidRequest(
            f"{prefix}size: {params.size!r} is not available; available: {available}",
            field=f"{prefix}size",
        )
    return params
