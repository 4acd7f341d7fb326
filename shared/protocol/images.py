"""Parameters of painted images. Their ranges are part of their types and schemas. Pure."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from shared.errors import InvalidRequest
from shared.helpers import patterns
from shared.protocol.sampling import MAX_SEED
from shared.protocol.versions import since

MAX_IMAGES = 10
MAX_STEPS = 200
MAX_PREVIEWS = 8
MAX_INPUT_IMAGES = 16

AUTO = "auto"
ImageSize = Annotated[str, Meta(pattern=patterns.SIZE)]
"""Width and height in pixels, such as `96x96`."""


Side = Annotated[int, Meta(ge=1, le=99_999)]
NumImages = Annotated[int, Meta(ge=1, le=MAX_IMAGES)]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Meta(ge=0.0, le=50.0)]
NegativePrompt = Annotated[str, Meta(max_length=4096)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
NumPreviews = Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)]
InputImages = Annotated[
    tuple[Annotated[str, Meta(pattern=patterns.MEDIA_URL)], ...],
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
    """`media:` URLs of stored JPEG, PNG or WEBP files: the images to edit, for a model that edits
    images."""

    # Names of diffusers. Two names of one value must agree.
    width: Annotated[Side | None, since(3)] = None
    """Width in pixels. With `height`, another form of `size`."""
    height: Annotated[Side | None, since(3)] = None
    """Height in pixels. With `width`, another form of `size`."""
    num_images_per_prompt: Annotated[NumImages | None, since(3)] = None
    """Another name of `n`."""
    num_inference_steps: Annotated[NumSteps | None, since(3)] = None
    """Another name of `steps`."""
    guidance_scale: Annotated[Guidance | None, since(3)] = None
    """Another name of `guidance`."""
    true_cfg_scale: Annotated[Guidance | None, since(3)] = None
    """Another name of `guidance`."""
    cfg_scale: Annotated[Guidance | None, since(3)] = None
    """Another name of `guidance`."""


class PaintParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a request's images, or of its video, with all defaults resolved."""

    size: Annotated[str, Meta(pattern=patterns.AUTO_OR_SIZE)]
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


NAMES: Mapping[str, tuple[str, ...]] = {
    "n": ("n", "num_images_per_prompt"),
    "steps": ("steps", "num_inference_steps"),
    "guidance": ("guidance", "guidance_scale", "true_cfg_scale", "cfg_scale"),
}
"""Names of each value of ImageParams; a client may use any."""
OTHER_NAMES = frozenset({"width", "height", *chain(*(names[1:] for names in NAMES.values()))})
"""Names that only requests have."""


def agreed(values: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> tuple[str, Any]:
    """Return the value of fields that are names of one value, and the name that the client used.

    The value is None if all are omitted. Raises InvalidRequest if two of them differ.
    """
    used = {name: value for name in names if (value := values.get(name)) is not None}
    for name, value in used.items():
        first = next(iter(used))
        if value != used[first]:
            raise _contradiction(prefix, name, value, first, used[first])
    return next(iter(used.items()), (names[0], None))


def agreed_size(values: Mapping[str, Any], prefix: str = "") -> tuple[str, str | None]:
    """Return the size in `size`, or in `width` and `height`, and the name of the field with it.

    Raises InvalidRequest if they differ, or if one of the sides is missing.
    """
    size, width, height = (values.get(name) for name in ("size", "width", "height"))
    if (width is None) != (height is None):
        name, other = ("height", "width") if width is None else ("width", "height")
        field = f"{prefix}{other}"
        raise InvalidRequest(f"{field}: required with {name}", field=field)
    if size == AUTO:
        size = None
    if width is None:
        return "size", size
    sides = f"{width}x{height}"
    if size not in (None, sides):
        raise _contradiction(prefix, "width", sides, "size", size)
    return "size" if size else "width", sides


def _contradiction(
    prefix: str, name: str, value: object, other: str, other_value: object
) -> InvalidRequest:
    field = f"{prefix}{name}"
    return InvalidRequest(
        f"{field}: {value} contradicts {other}, {other_value}: send one of them", field=field
    )


def canonical(params: Struct | None, prefix: str) -> dict[str, Any]:
    """Return the values of ImageParams or VideoParams by their first names.

    Raises InvalidRequest if two names of one value differ.
    """
    values = {} if params is None else msgspec.to_builtins(params)
    _, size = agreed_size(values, prefix)
    values_by_name = {"size": size}
    for name, names in NAMES.items():
        _, values_by_name[name] = agreed(values, names, prefix)
    rest = {name: value for name, value in values.items() if name not in OTHER_NAMES}
    return rest | {name: value for name, value in values_by_name.items() if value is not None}


def parse_size(size: str) -> tuple[int, int]:
    """Return the width and the height of an ImageSize."""
    width, _, height = size.partition("x")
    return int(width), int(height)


class SizeRule(NamedTuple):
    """Sizes that a stage paints besides those that it names."""

    multiple: int
    """Widths and heights are multiples of this, in pixels."""
    max_pixels: int
    """Limit on the product of width and height."""
    max_side: int
    """Limit on the width and the height."""

    def allows(self, size: str) -> bool:
        """Return whether a size follows the rule; another string than a size does not."""
        if re.fullmatch(patterns.SIDES, size) is None:
            return False
        sides = parse_size(size)
        return (
            all(side % self.multiple == 0 and side <= self.max_side for side in sides)
            and sides[0] * sides[1] <= self.max_pixels
        )

    def __str__(self) -> str:
        return (
            f"multiples of {self.multiple} up to {self.max_side}, together up to"
            f" {self.max_pixels} pixels"
        )


def check_size(size: str, sizes: Sequence[str], rule: SizeRule | None, field: str) -> None:
    """Raise InvalidRequest, which names `field`, for a size that a stage does not paint."""
    if size in sizes or (rule is not None and rule.allows(size)):
        return
    available = ", ".join(dict.fromkeys(sizes)) + ("" if rule is None else f", and {rule}")
    message = f"{field}: {size!r} is not available; available: {available}"
    raise InvalidRequest(message, field=field)


def check_input_images(count: int, limit: int, field: str) -> None:
    """Raise InvalidRequest unless a stage with this limit edits `count` images."""
    if count and not limit:
        raise InvalidRequest(f"{field}: the model edits no images", field=field)
    if limit and not 1 <= count <= limit:
        images = "one image" if limit == 1 else f"1 to {limit} images"
        raise InvalidRequest(f"{field}: the model edits {images}, not {count}", field=field)


def resolve_image(
    requested: ImageParams | None,
    defaults: Mapping[str, Any],
    sizes: Sequence[str],
    input_images: int = 0,
    rule: SizeRule | None = None,
) -> PaintParams:
    """Return the parameters of a request for a stage with these defaults and sizes.

    `rule` allows further sizes. `input_images` is the stage's limit on images to edit. Raises
    InvalidRequest for a size that the stage does not paint, for images that it does not edit, and
    if it edits images and there are none.
    """
    size = AUTO if input_images else sizes[0]
    params = resolve_params("image.", requested, {"size": size, **defaults}, [size, *sizes], rule)
    check_input_images(len(params.input_images), input_images, "image.input_images")
    return params


def resolve_params(
    prefix: str,
    requested: Struct | None,
    defaults: Mapping[str, Any],
    sizes: Sequence[str],
    rule: SizeRule | None = None,
) -> PaintParams:
    """Return the parameters of images or videos, which errors name with a prefix.

    Raises InvalidRequest for another size.
    """
    values = canonical(requested, prefix)
    params = msgspec.convert({**defaults, **values}, PaintParams)
    check_size(params.size, sizes, rule, f"{prefix}size")
    return params
