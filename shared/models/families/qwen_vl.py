"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size as patches in a grid, M-RoPE positions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec.arrays import from_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, FlatField, WireField
from shared.errors import InvalidRequest
from shared.models import layout, wire_pixels
from shared.models.family import MediaInput, ModelFamily
from shared.models.language import LanguageAdapter, MediaItem, MediaPrompt, PromptPositions
from shared.models.lazy_module import LazyModule
from shared.models.media import DecodedMedia
from shared.models.tower_adapter import (
    Fields,
    TowerAdapter,
    check_table,
    get_field,
    look_up,
    refuse,
)
from shared.models.wire_pixels import to_numpy
from shared.protocol.multimodal import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


class QwenImageLayout:
    """Patches of an image and their grid; one temporal frame, because all frames of it are equal.

    pixel_patches  uint8 [num_patches, channels, patch_height * patch_width]
    pixel_table    float32 [channels, 256], the normalised value of every pixel value
    image_grid_thw int64 [3], in patches: 1, rows, columns

    The processor's output is `pixel_table[channel, pixel_patches]`, repeated `temporal_patch_size`
    times.
    """

    metadata: tuple[str, ...] = ("image_grid_thw",)

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = layout.load_image_processor(folder, Qwen2VLImageProcessorPil)
        self._table = from_numpy(layout.value_table(self._processor))
        self.fingerprint = layout.fingerprint(self._processor)

    def process(self, media: DecodedMedia, field: str) -> tuple[dict[str, TensorData], int]:
        layout.check_aspect_ratio(media.image, field)
        output = self._processor(
            images=[media.image], do_rescale=False, do_normalize=False, return_tensors="np"
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
        """Restore the fields from rows of pixels or of normalised values."""
        names = ("image_grid_thw", "pixel_values")
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
        fields = {"pixel_patches": from_numpy(pixels), "pixel_table": table, "image_grid_thw": grid}
        return fields, num_patches // self._processor.merge_size**2

    def _check_grid(self, tensor: TensorData, field: str) -> tuple[int, int]:
        """Return the number of rows and columns. Raises InvalidRequest."""
        wire_pixels.check_shape("image_grid_thw", tensor, (3,), field)
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


class QwenTower(TowerAdapter):
    """The vision tower of Qwen2-VL and Qwen2.5-VL, for the fields of `QwenImageLayout`."""

    modules: tuple[str, ...] = ("model.visual",)
    metadata = ("image_grid_thw",)

    def count(self, fields: Fields) -> int:
        frames, height, width = get_field(fields, "image_grid_thw", torch.int64, (3,)).tolist()
        merge = self._config.vision_config.spatial_merge_size
        if frames != 1 or height <= 0 or width <= 0 or height % merge or width % merge:
            refuse(
                f"image_grid_thw is {[frames, height, width]}; it must be one frame whose sides"
                f" are multiples of {merge}"
            )
        return int(height * width // merge**2)

    def check(self, fields: Fields) -> None:
        vision = self._config.vision_config
        shape = (-1, vision.in_channels, vision.patch_size**2)
        patches = get_field(fields, "pixel_patches", torch.uint8, shape)
        check_table(get_field(fields, "pixel_table", torch.float32, (vision.in_channels, 256)))
        num_patches = self.count(fields) * vision.spatial_merge_size**2
        if num_patches != len(patches):
            refuse(f"image_grid_thw asks for {num_patches} patches, there are {len(patches)}")

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        pixel_values = torch.cat([self.restore(fields) for fields in batch])
        grids = torch.stack([fields["image_grid_thw"] for fields in batch])
        return self._embed(model, pixel_values.to(model.device), grids.to(model.device))

    def optimize_layers(self, model: Any) -> None:
        from shared.vision.layers import optimize_qwen_vision

        optimize_qwen_vision(model.model.visual)

    def sample(self) -> Fields:
        vision = self._config.vision_config
        side = 2 * vision.spatial_merge_size
        num_pixels = vision.patch_size**2
        return {
            "pixel_patches": torch.zeros(side**2, vision.in_channels, num_pixels).to(torch.uint8),
            "pixel_table": torch.zeros(vision.in_channels, 256),
            "image_grid_thw": torch.tensor([1, side, side]),
        }

    def restore(self, fields: Fields) -> Tensor:
        """Return the processor's pixel_values, bit for bit.

        [num_patches, channels * frames * patch_height * patch_width]
        """
        patches = fields["pixel_patches"]
        num_patches, channels, num_pixels = patches.shape
        frame = look_up(patches, fields["pixel_table"])
        frames = self._config.vision_config.temporal_patch_size
        shape = (num_patches, channels, frames, num_pixels)
        return frame.view(num_patches, channels, 1, num_pixels).expand(shape).flatten(1)

    def _embed(self, model: Any, pixel_values: Tensor, grids: Tensor) -> list[Tensor]:
        return list(model.get_image_features(pixel_values, grids).pooler_output)


class Qwen3Tower(QwenTower):
    """Qwen3-VL's tower: features of its earlier layers stand behind each embedding (DeepStack)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_levels = len(self._config.vision_config.deepstack_visual_indexes)

    def _embed(self, model: Any, pixel_values: Tensor, grids: Tensor) -> list[Tensor]:
        encoded = model.get_image_features(pixel_values, grids)
        levels = zip(encoded.pooler_output, *encoded.deepstack_features, strict=True)
        return [torch.cat(image_levels, dim=-1) for image_levels in levels]


class QwenAdapter(LanguageAdapter):
    """Positions in time, height and width (M-RoPE): the tokens of an image stand in a grid."""

    num_position_rows = 3

    def check(self, prompt: MediaPrompt) -> None:
        super().check(prompt)
        if any(item.placeholder.is_embed is not None for item in prompt.items):
            refuse("an image's placeholder is one run of tokens in this model")
        _check_apart(sort_by_offset(prompt.items))

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        if not prompt.items:
            return None
        token_ids = torch.tensor([prompt.prompt_token_ids])
        is_image = torch.zeros_like(token_ids)
        items = sort_by_offset(prompt.items)
        for item in items:
            start = item.placeholder.offset
            is_image[0, start : start + item.placeholder.length] = 1
        grids = torch.stack([item.fields["image_grid_thw"] for item in items])  # [num_items, 3]
        model: Any = self.model
        positions, delta = model.model.get_rope_index(
            token_ids, mm_token_type_ids=is_image, image_grid_thw=grids
        )
        return PromptPositions(positions[:, 0], int(delta))


class Qwen3VLAdapter(QwenAdapter):
    """Qwen3-VL's decoder adds further features of the images to its first hidden states."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        if deepstack is None:
            return super().forward(embeddings, positions, sampled_rows, None, **attention)
        # The whole model makes these features from pixels and accepts no finished ones.
        model: Any = self.model
        hidden = model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=positions[:, None],
            visual_pos_masks=torch.ones(embeddings.shape[:2], dtype=torch.bool),
            deepstack_visual_embeds=list(deepstack),
            use_cache=False,
            **attention,
        ).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits


def sort_by_offset(items: Sequence[MediaItem]) -> list[MediaItem]:
    return sorted(items, key=lambda item: item.placeholder.offset)


def _check_apart(items: Sequence[MediaItem]) -> None:
    """Check that there is text between images, because transformers tells them apart by it."""
    for left, right in itertools.pairwise(items):
        if left.placeholder.offset + left.placeholder.length >= right.placeholder.offset:
            refuse("the placeholders of two images touch")


_MEDIA = {IMAGE: MediaInput(QwenImageLayout, placeholder="image_token_id")}

FAMILIES = (
    ModelFamily(
        "Qwen2-VL",
        frozenset({"qwen2_vl", "qwen2_5_vl"}),
        decoders={
            "qwen2_vl_text": frozenset({"llama_like"}),
            "qwen2_5_vl_text": frozenset({"llama_like"}),
        },
        media=_MEDIA,
        tower=QwenTower,
        language=QwenAdapter,
    ),
    ModelFamily(
        "Qwen3-VL",
        frozenset({"qwen3_vl", "qwen3_vl_moe"}),
        decoders={"qwen3_vl_text": frozenset({"llama_like"})},
        media=_MEDIA,
        tower=Qwen3Tower,
        language=Qwen3VLAdapter,
    ),
)
