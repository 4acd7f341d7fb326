"""Denoising steps of images and videos: noise, and the interface of their models.

A model encodes texts once. An image begins as noise, each step moves its latents towards the
finished image, and the decoder turns the last latents into pixels. So does a video, with latents
that have frames as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shared.codec.envelope import TensorData
from shared.errors import ConfigError, ContextTooLong, InvalidRequest
from shared.protocol.images import PaintParams, parse_size

Noise = NDArray[np.float64]
"""Noise that an image or a video begins with, in the shape of the model."""
Pixels = NDArray[np.uint8]
"""A finished image, [height, width, 3], or a finished video, [frames, height, width, 3]."""
Size = tuple[int, int]
"""Width and height of an image or a video, in pixels."""


class InputImage(NamedTuple):
    """An image to edit, in the two sizes in which the networks read it."""

    for_text: Pixels
    """For the encoder of texts."""
    for_latents: Pixels
    """For the latents. An edited image has this size, unless the request has another one."""


class Condition(NamedTuple):
    """An encoded text, as the network reads it, and with it the images to edit."""

    arrays: Mapping[str, TensorData]
    """Tensors by the names that the model gives them, such as `prompt`, [num_tokens, width]."""
    num_tokens: int
    image_sizes: tuple[Size, ...] = ()
    """Sizes of the images to edit. The latents of these images are among the tensors."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.arrays.values())


class Progress(NamedTuple):
    """An unfinished image: everything that a step reads and writes."""

    latents: TensorData
    solver: Mapping[str, TensorData]
    """Results of earlier steps, for solvers that use several; empty for others."""


@dataclass(frozen=True, slots=True)
class Step:
    """Input of one step of one image."""

    progress: Progress
    prompt: Condition
    negative: Condition | None
    """Text that the image is guided away from; None without guidance."""
    guidance: float
    size: Size
    number: int
    """Number of completed steps."""
    steps: int
    """Number of all steps of the image."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of one step."""

    progress: Progress
    preview: TensorData
    """Latents of the finished image, as the network predicts them."""


class ImageModel(Protocol):
    """Model that paints images or videos from a text. It keeps no state of an image."""

    @property
    def empty_negative(self) -> str | None:
        """Text that images without a negative prompt are guided away from; None for a model
        without negative prompts."""

    @property
    def min_guidance(self) -> float:
        """Least scale of the guidance."""

    @property
    def no_guidance(self) -> float | None:
        """Scale that paints without guidance, and so without a negative prompt; None for a model
        that reads the guidance as a number."""

    def check_text(self, text: str, field: str) -> int:
        """Return the number of tokens of a text. Raises ContextTooLong, which names `field`.

        It is called in another thread than the other methods.
        """

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        """Encode texts. The result for a text does not depend on the other texts."""

    def noise_shape(self, size: Size) -> tuple[int, ...]:
        """Return the shape of the noise of an image of this size."""

    def begin(self, size: Size, noise: Noise) -> Progress:
        """Return an image of this size before its first step."""

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        """Compute one step of each image. All latents have the same shape."""

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        """Return the image of finished latents."""


@runtime_checkable
class VideoModel(Protocol):
    """Method that models of videos have in place of `noise_shape`."""

    def video_shape(self, size: Size, frames: int) -> tuple[int, ...]:
        """Return the shape of the noise of a video."""


def noise_shape_of(model: ImageModel, size: Size, frames: int | None) -> tuple[int, ...]:
    """Return the shape of the noise of an image, or of a video with a number of frames."""
    if frames is None:
        return model.noise_shape(size)
    assert isinstance(model, VideoModel)
    return model.video_shape(size, frames)


@runtime_checkable
class EditModel(ImageModel, Protocol):
    """Model that edits images by a text. It paints no image without others."""

    max_input_images: int
    """Limit on the images of one request. There is at least one."""

    def read_image(self, image: Pixels, field: str) -> InputImage:
        """Return an image in the sizes in which the networks read it.

        Raises InvalidMedia, which names `field`, for a shape that they cannot read. It is called in
        another thread than the other methods.
        """

    def encode_edit(self, texts: Sequence[str], images: Sequence[InputImage]) -> list[Condition]:
        """Encode texts, each with all images. A result does not depend on the other texts."""


def check_input_images(model: ImageModel, count: int, key: str) -> None:
    """Raise ConfigError unless the model edits up to `count` images.

    `key` is the stage's key in the settings.
    """
    limit = model.max_input_images if isinstance(model, EditModel) else 0
    if not min(1, limit) <= count <= limit:
        reads = f"edits 1 to {limit} images" if limit else "edits no images"
        message = f"{key}.input_images: {count} is not possible: the model {reads}"
        raise ConfigError(message, field=f"{key}.input_images")


def negative_of(model: ImageModel, params: PaintParams) -> str | None:
    """Return the text that an image is guided away from; None for an image without one."""
    if model.empty_negative is None or params.guidance == model.no_guidance:
        return None
    return params.negative_prompt or model.empty_negative


def check_guidance(model: ImageModel, params: PaintParams) -> None:
    """Raise InvalidRequest for a guidance without meaning, or a negative prompt without effect."""
    prefix = "image." if params.frames is None else "video."
    guidance, negative = f"{prefix}guidance", f"{prefix}negative_prompt"
    if params.guidance < model.min_guidance:
        raise InvalidRequest(
            f"{guidance}: {params.guidance:g} is less than {model.min_guidance:g}, with which this"
            " model paints without guidance",
            field=guidance,
        )
    if params.negative_prompt and model.empty_negative is None:
        raise InvalidRequest(f"{negative}: this model has no negative prompts", field=negative)
    if params.negative_prompt and params.guidance == model.no_guidance:
        raise InvalidRequest(
            f"{negative}: no effect with a guidance of {params.guidance:g}; remove it or raise"
            " guidance",
            field=negative,
        )
    if model.empty_negative is None and model.no_guidance not in (None, params.guidance):
        raise InvalidRequest(
            f"{guidance}: {params.guidance:g} has no effect, because this model paints without"
            f" guidance; remove it or set {model.no_guidance:g}",
            field=guidance,
        )


def check_sizes(
    sizes: Sequence[str], multiple: int, max_patches: int, key: str, max_side: int | None = None
) -> None:
    """Raise ConfigError for a size that a model with patches of `multiple` pixels does not support.

    `key` is the stage's key in the settings, and `max_side` the limit of patches of one side.
    """
    for size in sizes:
        width, height = parse_size(size)
        if width % multiple or height % multiple:
            message = f"{size}: width and height must be multiples of {multiple}"
        elif (num := width * height // multiple**2) > max_patches:
            message = f"{size}: {num} patches are over the limit of {max_patches}"
        elif max_side is not None and (side := max(width, height) // multiple) > max_side:
            message = f"{size}: {side} patches of one side are over the limit of {max_side}"
        else:
            continue
        raise ConfigError(f"{key}.sizes: {message}", field=f"{key}.sizes")


def size_of(image: Pixels) -> Size:
    """Return the width and the height of an image."""
    height, width, _ = image.shape
    return width, height


def check_num_tokens(num_tokens: int, limit: int, field: str) -> int:
    """Return the number of tokens of a text. Raises ContextTooLong, which names `field`."""
    if num_tokens > limit:
        raise ContextTooLong(
            f"{field}: the text has {num_tokens} tokens, over the model's limit of {limit}",
            field=field,
        )
    return num_tokens


def noise_of(seed: int, number: int, shape: tuple[int, ...]) -> Noise:
    """Return the noise of image `number` of a request with this seed.

    It is a function of the two numbers, by a counter-based generator.
    """
    return np.random.Generator(np.random.Philox(key=[seed, number])).standard_normal(shape)
