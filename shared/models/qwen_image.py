"""Image layout of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of images of any size, in a grid."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, FlatField, WireField
from shared.errors import InvalidRequest
from shared.models import layout, wire_pixels
from shared.models.media import DecodedImage

IMAGE_GRID = "image_grid_thw"


class QwenImageLayout(layout.ImageLayout):
    """Patches of an image and their grid. All temporal frames are equal, so only one is sent.

    pixel_patches  uint8 [num_patches, channels, patch_height * patch_width]
    pixel_table    float32 [channels, 256], the normalised value of every pixel value
    image_grid_thw int64 [3], in patches: 1, rows, columns

    The processor's output is `pixel_table[channel, pixel_patches]`, repeated `temporal_patch_size`
    times.
    """

    metadata = (IMAGE_GRID,)
    sends_values = False
    """Whether vLLM's engine accepts normalised values instead of 8-bit pixels."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = layout.load_image_processor(folder, Qwen2VLImageProcessorPil)
        self._table = from_numpy(layout.value_table(self._processor))
        self.fingerprint = layout.fingerprint(self._processor)

    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        layout.check_aspect_ratio(media.image, field)
        output = self._processor(
            images=[media.image], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        grid = output[IMAGE_GRID][0]
        fields = {
            "pixel_patches": from_numpy(self._first_frame(output["pixel_values"])),
            "pixel_table": self._table,
            IMAGE_GRID: from_numpy(grid),
        }
        num_tokens = int(grid.prod()) // self._processor.merge_size**2
        return fields, num_tokens

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        patches: NDArray[Any] = to_numpy(fields["pixel_patches"])
        if self.sends_values:
            patches = wire_pixels.to_values(patches, fields["pixel_table"])
        frames = np.repeat(patches[:, :, None], self._processor.temporal_patch_size, axis=2)
        rows = frames.reshape(len(patches), -1)
        return {
            IMAGE_GRID: WireField(fields[IMAGE_GRID], BatchedField(keep_on_cpu=True)),
            "pixel_values": WireField(from_numpy(rows), FlatField([[[0, len(rows), None]]])),
        }

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Restore the fields from rows of pixels or of normalised values."""
        names = (IMAGE_GRID, "pixel_values")
        grid, rows = wire_pixels.tensors_of(wire, names, field)
        height, width = self._check_grid(grid, field)
        side, frames = self._processor.patch_size, self._processor.temporal_patch_size
        channels, num_patches = self._table.shape[0], height * width
        shape = (num_patches, channels * frames * side**2)
        wire_pixels.check_shape("pixel_values", rows, shape, field)
        patches = to_numpy(rows).reshape(num_patches, channels, frames, side**2)
        first = np.ascontiguousarray(patches[:, :, 0])
        if not all(np.array_equal(first, patches[:, :, i]) for i in range(1, frames)):
            raise InvalidRequest("the frames of a still image differ", field=field)
        pixels, table = wire_pixels.to_pixels(first, self._table, field)
        fields = {"pixel_patches": from_numpy(pixels), "pixel_table": table, IMAGE_GRID: grid}
        return fields, num_patches // self._processor.merge_size**2

    def _check_grid(self, tensor: TensorData, field: str) -> tuple[int, int]:
        """Return the number of rows and columns. Raises InvalidRequest."""
        wire_pixels.check_shape(IMAGE_GRID, tensor, (3,), field)
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
        """Return the first frame of each patch, [num_patches, channels, patch_h * patch_w].

        `pixel_values` has whole numbers, [num_patches, channels * frames * patch_h * patch_w].
        """
        frames, patch_len = self._processor.temporal_patch_size, self._processor.patch_size**2
        rows = pixel_values.reshape(len(pixel_values), -1, frames, patch_len)
        return rows[:, :, 0].astype(np.uint8)
