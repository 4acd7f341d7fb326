"""Request and response bodies of OpenAI's image generation, and events of its streams. Pure."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from shared.protocol.images import (
    AUTO,
    MAX_INPUT_IMAGES,
    Guidance,
    NegativePrompt,
    NumImages,
    NumPreviews,
    NumSteps,
    Seed,
    Side,
)

UNSUPPORTED = frozenset(
    {"background", "input_fidelity", "mask", "moderation", "output_compression", "quality", "style"}
)
PNG = "png"
B64_JSON, URL = "b64_json", "url"


class ImagesRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    """Description of the images."""
    n: NumImages | None = None
    """Number of images; by default 1, or as configured if it is no stream."""
    num_images_per_prompt: NumImages | None = None
    """Name of `n` in diffusers. Two names of one value must agree."""
    size: str | None = None
    """One of the model's sizes, such as `120x120`; by default, and for `auto`, its default size, or
    of an edited image about the aspect ratio of the last image to edit."""
    width: Side | None = None
    """Width in pixels. With `height`, another form of `size`."""
    height: Side | None = None
    """Height in pixels. With `width`, another form of `size`."""
    response_format: str = B64_JSON
    """`b64_json`, or `url` for the URL of a file, which streams do not support."""
    output_format: str = PNG
    """`png`"""
    stream: bool = False
    """Send events: the requested previews, and the image."""
    partial_images: NumPreviews | None = None
    """Previews in a stream, at equal distances; by default none."""
    seed: Seed | None = None
    """With the same seed and the same parameters, the images are the same."""
    num_inference_steps: NumSteps | None = None
    """Number of denoising steps; by default as configured for the model."""
    guidance_scale: Guidance | None = None
    """Scale of the classifier-free guidance, 1, and for some models 0, for none; by default as
    configured for the model."""
    true_cfg_scale: Guidance | None = None
    """Name of `guidance_scale` in some pipelines of diffusers."""
    cfg_scale: Guidance | None = None
    """Another name of `guidance_scale`."""
    negative_prompt: NegativePrompt | None = None
    """Description of content that the images should not have."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the last image: by default `delivery.default_timeout_s`, at most
    `delivery.max_timeout_s`."""

    durable: bool | None = None
    """Continue painting when the connection closes."""

    # Other values of these fields would have an effect that is not implemented.
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    quality: Literal["auto", "standard"] | None = None

    user: str | None = None
    """No effect."""


class EditedImage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An image to edit. Exactly one field is set."""

    file_id: str | None = None
    """Id of a file of `/v1/files`."""
    image_url: str | None = None
    """`data:` URL with base64, or `media:` URL of a stored file."""


class StoredEdit(ImagesRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Edit of images that are in the body or stored, as JSON."""

    images: Annotated[list[EditedImage], Meta(min_length=1, max_length=MAX_INPUT_IMAGES)]
    """Images to edit."""


class ImageEntry(Struct, frozen=True, kw_only=True):
    b64_json: str | UnsetType = UNSET
    """Base64 of the file."""
    url: str | UnsetType = UNSET
    """URL of the file, valid while the file is stored."""


class ImageUsageDetails(Struct, frozen=True):
    text_tokens: int
    image_tokens: int = 0


class ImageUsage(Struct, frozen=True):
    """Tokens of the prompt. Images have no tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageUsageDetails


class ImagesAnswer(Struct, frozen=True):
    created: int
    data: list[ImageEntry]
    size: str
    usage: ImageUsage
    output_format: str = PNG
    background: str = "opaque"


class ImageEvent(Struct, frozen=True, kw_only=True):
    """A preview (`image_generation.partial_image`), or an image (`image_generation.completed`).

    Events of edited images begin with `image_edit` instead.
    """

    type: str
    b64_json: str
    created_at: int
    size: str
    image_index: int
    """Number of the image in the request, from 0."""
    partial_image_index: int | UnsetType = UNSET
    """Number of the preview of its image, from 0."""
    usage: ImageUsage | UnsetType = UNSET
    """Set with an image. The tokens of the prompt are counted with the last one."""
    output_format: str = PNG
    quality: str = AUTO
    background: str = "opaque"


def usage_of(prompt_tokens: float) -> ImageUsage:
    num = int(prompt_tokens)
    return ImageUsage(num, 0, num, ImageUsageDetails(num))
