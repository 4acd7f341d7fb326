"""Media layouts: how a family's processor turns decoded media into fields and a number of tokens.

A layout wraps transformers' own image processor. Pixels stay 8 bits wide on their way to the
engine. The rest of the processor's arithmetic is a table of 256 values per channel, computed by the
processor's own functions, so that `pixel_table[channel, pixel]` restores its output bit for bit.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, InvalidMedia
from shared.models.media import DecodedMedia
from shared.protocol.multimodal import content_hash

# transformers leaves this function without types.
_load_image_processor: Any = AutoImageProcessor.from_pretrained

# Qwen2-VL's processor raises ValueError beyond this ratio, and CLIP's scales the shorter side up,
# which makes gigabytes of an image that is one line.
MAX_ASPECT_RATIO = 200


class MediaLayout(Protocol):
    """The fields that one family makes of one modality."""

    fingerprint: str
    """Equal for processors that return equal fields for equal media."""
    metadata: tuple[str, ...]
    """Names of the fields that the language model needs, whichever worker runs the tower."""

    def process(self, media: DecodedMedia, field: str) -> tuple[dict[str, TensorData], int]:
        """Return the fields and the number of tokens of one medium.

        Raises InvalidMedia, naming `field`, for media that the model cannot take.
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
