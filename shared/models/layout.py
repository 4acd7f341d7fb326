"""Media layouts: conversion of decoded media to fields and a number of tokens, for each family.

An image layout wraps transformers' image processor. Pixels are sent to the engine in 8 bits. The
rest of the processor's arithmetic is a table of 256 values per channel, computed by the processor's
functions, so that `pixel_table[channel, pixel]` restores its output bit for bit.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, InvalidMedia
from shared.helpers.validation import reason_of
from shared.models.media import DecodedImage, VideoProbe
from shared.protocol.multimodal import FrameSampling, Placement, content_hash

# transformers leaves this function without types.
_load_image_processor: Any = AutoImageProcessor.from_pretrained

# Qwen2-VL's processor raises ValueError beyond this ratio. CLIP's processor scales the shorter side
# up, so that an image of one line would need gigabytes.
MAX_ASPECT_RATIO = 200
# One of these files has the settings of the processor.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class Layout(ABC):
    """Fields of one modality in one family."""

    fingerprint: str
    """Equal for processors that return equal fields for equal media and sampling."""
    metadata: tuple[str, ...] = ()
    """Names of the fields that the language model needs, even if another worker runs the tower."""
    embed_ids: tuple[int, ...] = ()
    """Tokens that embeddings replace, if there may be text among the tokens of an item."""
    marker_id: int | None = None
    """Token that a chat template writes for an item; None for the placeholder token."""
    around: tuple[str, str] = ("", "")
    """White space before and after the tokens of an item, which the tokenizer may merge with the
    text next to it."""

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement | None:
        """Return the tokens of an item with these metadata; None for a run of placeholders.

        `encode` returns the tokens of a text, without any that the tokenizer adds.
        """
        return None

    @abstractmethod
    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        """Return processed fields in the encoding that vLLM's servers exchange."""

    @abstractmethod
    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return fields and the number of embeddings of an item that another server has processed.

        Raises InvalidRequest, naming `field`, for fields that do not fit this model.
        """


class ImageLayout(Layout):
    """Fields of images in one family."""

    @abstractmethod
    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        """Return the fields and the number of embeddings of one image.

        Raises InvalidMedia, naming `field`, for an image that the model does not accept.
        """


class HasTokens(Protocol):
    @property
    def num_tokens(self) -> int: ...


Probe = TypeVar("Probe")
Plan = TypeVar("Plan", bound=HasTokens)
Part = TypeVar("Part")


class PlannedLayout(Layout, Generic[Probe, Plan, Part]):
    """Fields of videos or sounds in one family.

    The parts to decode and the number of tokens are planned before anything is decoded.
    """

    window_s: float = math.inf
    """Longest sound that the model processes at once."""
    sound: "PlannedLayout[Any, Any, Any] | None" = None
    """Layout of the sound of a video; None for a model that does not use it. The fields of both
    are one item."""

    @abstractmethod
    def plan(self, probe: Probe, sampling: FrameSampling, field: str) -> Plan:
        """Plan the parts to decode. Raises a RequestError, naming `field`, for unsupported media.

        The `max_frames` of `sampling` is set to the model's limit or less; sounds ignore it.
        """

    @abstractmethod
    def pack(
        self, parts: Iterator[Part], plan: Plan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the fields and the number of embeddings of the planned parts.

        Each part is dropped before the next is decoded. Raises InvalidMedia, naming `field`.
        """

    @abstractmethod
    def outline(
        self, parts: Iterator[Part], plan: Plan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the metadata and the number of embeddings that `pack` would return.

        No part is read if the plan is enough for it. Raises InvalidMedia, naming `field`.
        """


MediaLayout = ImageLayout | PlannedLayout[Any, Any, Any]


def check_processor_file(folder: Path) -> None:
    """Raise ConfigError for a folder without the file that states how its media are prepared."""
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise ConfigError(
            f"{folder} has no {PROCESSOR_FILES[0]}, which states how images and sounds are"
            " prepared: copy the file from the original model",
            field="path",
        )
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            try:
                msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
            except (OSError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"{folder / name} cannot be read: {reason_of(error)}", field="path"
                ) from error


def load_image_processor(folder: Path, kind: type) -> Any:
    """Load the image processor of a model folder, which must be a `kind`. Raises ConfigError."""
    check_processor_file(folder)
    try:
        # The processor is untyped; callers check its output by shape.
        processor: Any = _load_image_processor(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder}: no image processor: {error}", field="path") from error
    if not isinstance(processor, kind):
        raise ConfigError(
            f"{folder}: the image processor is a {type(processor).__name__}; this model family"
            f" needs a {kind.__name__}",
            field="path",
        )
    return processor


def check_aspect_ratio(image: Image.Image, field: str) -> None:
    """Raise InvalidMedia for an image over `MAX_ASPECT_RATIO`."""
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMedia(
            f"an image of {width} x {height} is more than {MAX_ASPECT_RATIO} times as long as wide",
            field=field,
        )


def check_frame_ratio(probe: VideoProbe, field: str) -> None:
    """Raise InvalidMedia for a video over `MAX_ASPECT_RATIO`."""
    if max(probe.width, probe.height) > MAX_ASPECT_RATIO * min(probe.width, probe.height):
        raise InvalidMedia(
            f"a video of {probe.width} x {probe.height} is more than {MAX_ASPECT_RATIO} times as"
            " long as wide",
            field=field,
        )


def fingerprint(processor: Any, *settings: object) -> str:
    own = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return content_hash(type(processor).__qualname__, own, *map(repr, settings))


def value_table(processor: Any) -> NDArray[np.float32]:  # [channels, 256]
    """Return the result of the processor's arithmetic for each of the 256 values of a pixel.

    A formula gave equal results for only 443 of 768 values, because the order of operations
    matters.
    """
    values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # [channels, 1, 256]
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return values[:, 0].astype(np.float32)
