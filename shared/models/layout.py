"""Media layouts: how a family's processor turns decoded media into fields and a number of tokens.

An image layout wraps transformers' own image processor. Pixels stay 8 bits wide on their way to the
engine. The rest of the processor's arithmetic is a table of 256 values per channel, computed by the
processor's own functions, so that `pixel_table[channel, pixel]` restores its output bit for bit.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, InvalidMedia
from shared.models.media import DecodedImage, VideoProbe
from shared.protocol.multimodal import FrameSampling, Placement, content_hash

# transformers leaves this function without types.
_load_image_processor: Any = AutoImageProcessor.from_pretrained

# Qwen2-VL's processor raises ValueError beyond this ratio, and CLIP's scales the shorter side up,
# which makes gigabytes of an image that is one line.
MAX_ASPECT_RATIO = 200


class ImageLayout(Protocol):
    """The fields that one family makes of images."""

    fingerprint: str
    """Equal for processors that return equal fields for equal media."""
    metadata: tuple[str, ...]
    """Names of the fields that the language model needs, whichever worker runs the tower."""

    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        """Return the fields and the number of tokens of one image.

        Raises InvalidMedia, naming `field`, for an image that the model cannot take.
        """
        ...

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        """Return the fields of `process` in the encoding that vLLM's servers exchange."""
        ...

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return what `process` returns, from the fields that another server has processed.

        Raises InvalidRequest, naming `field`, for fields that do not fit this model.
        """
        ...


class HasTokens(Protocol):
    @property
    def num_tokens(self) -> int: ...


Probe = TypeVar("Probe")
Plan = TypeVar("Plan", bound=HasTokens)
Part = TypeVar("Part")


class PlannedLayout(ABC, Generic[Probe, Plan, Part]):
    """The fields that one family makes of videos or sounds.

    What is decoded, and how many tokens follow from it, is planned before anything is decoded.
    """

    fingerprint: str
    """Equal for processors that return equal fields for equal media and sampling."""
    metadata: tuple[str, ...] = ()
    """Names of the fields that the language model needs, whichever worker runs the tower."""
    embed_ids: tuple[int, ...] = ()
    """Tokens that embeddings replace, if there may be text among the tokens of an item."""
    window_s: float = math.inf
    """Longest sound that the model hears at once."""
    sound: "PlannedLayout[Any, Any, Any] | None" = None
    """Layout of the sound of a video; None for a model that does not hear it. The fields of both
    are one item."""

    @abstractmethod
    def plan(self, probe: Probe, sampling: FrameSampling, field: str) -> Plan:
        """Plan what to decode. Raises a RequestError, naming `field`, for what cannot be taken.

        The `max_frames` of `sampling` is set to the model's limit or less; sounds ignore it.
        """

    @abstractmethod
    def pack(
        self, parts: Iterator[Part], plan: Plan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the fields and the number of embeddings of what was planned.

        Each part is dropped before the next is decoded. Raises InvalidMedia, naming `field`.
        """

    @abstractmethod
    def outline(
        self, parts: Iterator[Part], plan: Plan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the metadata and the number of embeddings that `pack` would return.

        No part is read if the plan is enough for it. Raises InvalidMedia, naming `field`.
        """

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement | None:
        """Return the tokens of an item with these metadata; None for a run of placeholders.

        `encode` returns the tokens of a text, without any that the tokenizer adds.
        """
        return None

    @abstractmethod
    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        """Return the fields of `pack` in the encoding that vLLM's servers exchange."""

    @abstractmethod
    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return what `pack` returns, from the fields that another server has processed.

        Raises InvalidRequest, naming `field`, for fields that do not fit this model.
        """


MediaLayout = ImageLayout | PlannedLayout[Any, Any, Any]


def load_image_processor(folder: Path, kind: type) -> Any:
    """Load the image processor of a model folder, which must be a `kind`. Raises ConfigError."""
    try:
        # The processor is untyped; callers check its output by shape.
        processor: Any = _load_image_processor(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no image processor: {error}", field="path") from error
    if not isinstance(processor, kind):
        raise ConfigError(
            f"{folder}: the image processor is a {type(processor).__name__}; this model family"
            f" takes a {kind.__name__}",
            field="path",
        )
    return processor


def check_aspect_ratio(image: Image.Image, field: str) -> None:
    """Raises InvalidMedia."""
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMedia(
            f"an image of {width} x {height} is more than {MAX_ASPECT_RATIO} times as long as wide",
            field=field,
        )


def check_frame_ratio(probe: VideoProbe, field: str) -> None:
    """Raises InvalidMedia."""
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
    """Return the processor's own arithmetic on each of the 256 values of a pixel.

    A formula gave equal results for 443 of 768 values only; the order of operations matters.
    """
    values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # [channels, 1, 256]
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return values[:, 0].astype(np.float32)
