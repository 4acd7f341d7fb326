"""How each model family takes a picture: its pixels as fields, and how many tokens they fill.

A class per family, around transformers' own picture processor; nothing else here knows their
layouts. Pixels stay small on the way to the engine: 8 bits each. What is left of the processor's
work is a table of 256 values per channel, computed by the processor's own functions, so that the
processor's output is restored bit for bit: `pixel_table[channel, pixel]`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_numpy
from shared.codec.vllm_kwargs import BatchedField, FlatField, WireField
from shared.errors import ConfigError, InvalidMedia, InvalidRequest
from shared.protocol.multimodal import content_hash
from workers.renderer.processing import vllm_kwargs
from workers.renderer.processing.vllm_kwargs import to_numpy

# transformers leaves this one without types.
_load_image_processor: Any = AutoImageProcessor.from_pretrained

# Qwen2-VL's processor raises ValueError beyond it, and CLIP's makes gigabytes of a line when it
# scales the shorter side up.
MAX_ASPECT_RATIO = 200


class ImageLayout(Protocol):
    fingerprint: str
    """Equal for processors that make the same of every picture."""
    metadata: tuple[str, ...]
    """Fields that the language model needs, whoever encodes the picture."""

    def process(self, image: Image.Image, field: str) -> tuple[dict[str, TensorData], int]:
        """Fields of one RGB picture, and how many tokens it fills.

        Raises InvalidMedia, naming `field`, for a picture that the model cannot take.
        """
        ...

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        """What `process` has made, as vLLM's servers give it to each other."""
        ...

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """What `process` makes, of a picture that another server has processed.

        Raises InvalidRequest, naming `field`, for what is no picture of this model's.
        """
        ...


def layout_of(folder: Path, config: Any) -> ImageLayout:
    """The layout of the model in `folder`, whose config.json is `config`.

    Raises ConfigError for one that is not known, or whose settings contradict each other.
    """
    try:
        # Untyped from here on; what comes out is checked by shape.
        processor: Any = _load_image_processor(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no picture processor: {error}", field="path") from error
    if isinstance(processor, Qwen2VLImageProcessorPil):
        return Qwen2VLLayout(processor)
    if isinstance(processor, CLIPImageProcessorPil) and config.model_type == "llava":
        return LlavaLayout(processor, config, folder)
    raise ConfigError(
        f"{folder}: pictures are known as Qwen2-VL and LLaVA 1.5 take them, not for"
        f" {type(processor).__name__} of {config.model_type!r}",
        field="path",
    )


class Qwen2VLLayout:
    """Patches and a grid; and one temporal frame, because a still picture's frames are equal.

    pixel_patches  uint8 [num_patches, channels, patch_h * patch_w]
    pixel_table    float32 [channels, 256], the normalised value of every pixel value
    image_grid_thw int64 [3], in patches: 1, rows, columns

    The processor's output is `pixel_table[channel, pixel_patches]`, repeated `temporal_patch_size`
    times.
    """

    metadata: tuple[str, ...] = ("image_grid_thw",)

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._table = from_numpy(_value_table(processor))
        self.fingerprint = _fingerprint(processor)

    def process(self, image: Image.Image, field: str) -> tuple[dict[str, TensorData], int]:
        _check_aspect_ratio(image, field)
        output = self._processor(
            images=[image], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        grid = output["image_grid_thw"][0]
        fields = {
            "pixel_patches": from_numpy(self._first_frame(output["pixel_values"])),
            "pixel_table": self._table,
            "image_grid_thw": from_numpy(grid),
        }
        num_tokens = int(grid.prod()) // self._processor.merge_size**2
        return fields, num_tokens

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        patches = to_numpy(fields["pixel_patches"])
        frames = np.repeat(patches[:, :, None], self._processor.temporal_patch_size, axis=2)
        rows = frames.reshape(len(patches), -1)
        return {
            "image_grid_thw": WireField(fields["image_grid_thw"], BatchedField(keep_on_cpu=True)),
            "pixel_values": WireField(from_numpy(rows), FlatField([[[0, len(rows), None]]])),
        }

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Rows may be pixels, or the values that they have become."""
        grid, rows = vllm_kwargs.tensors_of(wire, ("image_grid_thw", "pixel_values"), field)
        height, width = self._check_grid(grid, field)
        side, frames = self._processor.patch_size, self._processor.temporal_patch_size
        channels, num_patches = self._table.shape[0], height * width
        shape = (num_patches, channels * frames * side**2)
        vllm_kwargs.check_shape("pixel_values", rows, shape, field)
        each = to_numpy(rows).reshape(num_patches, channels, frames, side**2)
        first = np.ascontiguousarray(each[:, :, 0])
        if not all(np.array_equal(first, each[:, :, i]) for i in range(1, frames)):
            raise InvalidRequest("the frames of a still picture differ", field=field)
        pixels, table = vllm_kwargs.indexed(first, self._table, field)
        fields = {
            "pixel_patches": from_numpy(pixels),
            "pixel_table": table,
            "image_grid_thw": grid,
        }
        return fields, num_patches // self._processor.merge_size**2

    def _check_grid(self, tensor: TensorData, field: str) -> tuple[int, int]:
        """Rows and columns. Raises InvalidRequest."""
        vllm_kwargs.check_shape("image_grid_thw", tensor, (3,), field)
        if tensor.dtype != "int64":
            raise InvalidRequest("image_grid_thw must be int64", field=field)
        frames, height, width = map(int, to_numpy(tensor))
        merge = self._processor.merge_size
        if frames != 1 or min(height, width) < 1 or height % merge or width % merge:
            raise InvalidRequest(
                f"image_grid_thw is {[frames, height, width]}, not 1 and multiples of {merge}",
                field=field,
            )
        return height, width

    def _first_frame(self, pixel_values: NDArray[Any]) -> NDArray[np.uint8]:
        """float [num_patches, channels * frames * patch_h * patch_w] of whole numbers, as uint8."""
        frames, patch_len = self._processor.temporal_patch_size, self._processor.patch_size**2
        rows = pixel_values.reshape(len(pixel_values), -1, frames, patch_len)
        return rows[:, :, 0].astype(np.uint8)


class LlavaSettings(msgspec.Struct, frozen=True):
    """Of processor_config.json, what LLaVA's number of tokens depends on."""

    patch_size: int
    vision_feature_select_strategy: Literal["default", "full"] | None = None
    num_additional_image_tokens: int = 0


class LlavaLayout:
    """LLaVA 1.5's: every picture as one square for a CLIP tower.

    pixels      uint8 [channels, height, width], resized and cropped
    pixel_table float32 [channels, 256], the normalised value of every pixel value
    """

    metadata: tuple[str, ...] = ()

    def __init__(self, processor: Any, config: Any, folder: Path) -> None:
        self._processor = processor
        self._settings = _read_settings(folder)
        table = _value_table(processor)
        self._table = from_numpy(table)
        self.fingerprint = _fingerprint(processor, self._settings)
        vision = config.vision_config
        self._shape = (vision.num_channels, vision.image_size, vision.image_size)
        try:
            self._check_settings(config)
            self._check_output(config.vision_config, table)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error.message}", field="path") from None

    def process(self, image: Image.Image, field: str) -> tuple[dict[str, TensorData], int]:
        _check_aspect_ratio(image, field)
        pixels = self._pixels(image)
        fields = {"pixels": from_numpy(pixels), "pixel_table": self._table}
        return fields, self._num_tokens(*pixels.shape[1:])

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        pixels, table = to_numpy(fields["pixels"]), to_numpy(fields["pixel_table"])
        values = table[np.arange(len(table))[:, None, None], pixels]
        return {"pixel_values": WireField(from_numpy(values), BatchedField())}

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        (values,) = vllm_kwargs.tensors_of(wire, ("pixel_values",), field)
        vllm_kwargs.check_shape("pixel_values", values, self._shape, field)
        pixels, table = vllm_kwargs.indexed(to_numpy(values)[None], self._table, field)
        fields = {"pixels": from_numpy(pixels[0]), "pixel_table": table}
        return fields, self._num_tokens(*self._shape[1:])

    def _pixels(self, image: Image.Image) -> NDArray[np.uint8]:  # [channels, height, width]
        output = self._processor(
            images=[image], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        return np.ascontiguousarray(output["pixel_values"][0], dtype=np.uint8)

    def _num_tokens(self, height: int, width: int) -> int:
        settings = self._settings
        num_patches = (height // settings.patch_size) * (width // settings.patch_size)
        left_out = settings.vision_feature_select_strategy == "default"
        return num_patches + settings.num_additional_image_tokens - left_out

    def _check_settings(self, config: Any) -> None:
        vision = config.vision_config
        if vision.model_type != "clip_vision_model":
            raise ConfigError(f"LLaVA is known with a CLIP tower, not with {vision.model_type!r}")
        if self._settings.patch_size != vision.patch_size:
            raise ConfigError(
                f"processor_config.json has patch_size {self._settings.patch_size}, the vision"
                f" tower {vision.patch_size}"
            )
        # CLIP puts a class token before the patches; "default" leaves it out.
        has_class = config.vision_feature_select_strategy == "full"
        num_embeddings = (vision.image_size // vision.patch_size) ** 2 + has_class
        num_tokens = self._num_tokens(vision.image_size, vision.image_size)
        if num_tokens != num_embeddings:
            raise ConfigError(
                f"processor_config.json makes {num_tokens} tokens of a picture, the model"
                f" {num_embeddings} embeddings: num_additional_image_tokens or"
                " vision_feature_select_strategy is not the model's"
            )

    def _check_output(self, vision: Any, table: NDArray[np.float32]) -> None:
        """Tried on a picture of each orientation, because settings combine in many ways."""
        rows, columns = np.indices((40, 60), dtype=np.uint8)
        raster = np.stack([4 * columns, 6 * rows, columns + rows], axis=-1)
        for image in (Image.fromarray(raster), Image.fromarray(raster.swapaxes(0, 1).copy())):
            pixels = self._pixels(image)
            expected = (vision.num_channels, vision.image_size, vision.image_size)
            if pixels.shape != expected:
                raise ConfigError(
                    f"the picture processor makes {list(pixels.shape)} of a picture, the vision"
                    f" tower takes {list(expected)}"
                )
            whole = self._processor(images=[image], return_tensors="np")["pixel_values"][0]
            if not np.array_equal(table[np.arange(len(table))[:, None, None], pixels], whole):
                raise ConfigError("the picture processor does more than to rescale and normalise")


def _read_settings(folder: Path) -> LlavaSettings:
    try:
        return msgspec.json.decode(
            (folder / "processor_config.json").read_bytes(), type=LlavaSettings
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder}: processor_config.json: {error}", field="path") from error


def _check_aspect_ratio(image: Image.Image, field: str) -> None:
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMedia(
            f"a picture of {width} x {height} is more than {MAX_ASPECT_RATIO} times as long as"
            " wide",
            field=field,
        )


def _fingerprint(processor: Any, *settings: object) -> str:
    own = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return content_hash(type(processor).__qualname__, own, *map(repr, settings))


def _value_table(processor: Any) -> NDArray[np.float32]:
    """float32 [channels, 256]: the processor's own arithmetic on every value that a pixel has.

    Recomputing it by formula was equal on 443 of 768 values only; the order of operations matters.
    """
    values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # [channels, 1, 256]
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return values[:, 0].astype(np.float32)
