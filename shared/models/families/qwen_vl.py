"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size as patches, M-RoPE positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from shared.models.family import MediaInput, ModelFamily
from shared.models.language import LanguageAdapter, MediaItem, MediaPrompt, PromptPositions
from shared.models.layout import MediaLayout
from shared.models.lazy_module import LazyModule
from shared.models.mrope import GridRun, Run, locate_grids
from shared.models.qwen_geometry import Geometries, Geometry
from shared.models.qwen_image import IMAGE_GRID, QwenImageLayout
from shared.models.qwen_video import GRID as VIDEO_GRID
from shared.models.qwen_video import SECONDS, Qwen3VideoLayout, Qwen25VideoLayout, QwenVideoLayout
from shared.models.reach import MAX_GRID_SECONDS, positions_per_second
from shared.models.tower_adapter import (
    Fields,
    TowerAdapter,
    check_table,
    get_field,
    look_up,
    refuse,
)
from shared.native.choices import KernelSetting
from shared.protocol.multimodal import IMAGE, VIDEO, Modality

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    torch = LazyModule("torch")


_GRIDS: Mapping[str, str] = {IMAGE: IMAGE_GRID, VIDEO: VIDEO_GRID}


class QwenTower(TowerAdapter):
    """Vision tower of Qwen2-VL and Qwen2.5-VL, for the fields of their layouts."""

    modules: tuple[str, ...] = ("model.visual",)
    metadata = (IMAGE_GRID,)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._geometries = Geometries()

    def count(self, fields: Fields) -> int:
        frames, height, width = get_field(fields, grid_name(fields), torch.int64, (3,)).tolist()
        merge = self._config.vision_config.spatial_merge_size
        is_still = frames == 1 or (frames > 0 and VIDEO_GRID in fields)
        if not is_still or height <= 0 or width <= 0 or height % merge or width % merge:
            refuse(
                f"{grid_name(fields)} is {[frames, height, width]}; it must be one frame, or the"
                f" frames of a video, with sides that are multiples of {merge}"
            )
        return int(frames * height * width // merge**2)

    def check(self, fields: Fields) -> None:
        vision = self._config.vision_config
        if VIDEO_GRID in fields:
            name, num_pixels = "video_patches", vision.temporal_patch_size * vision.patch_size**2
        else:
            name, num_pixels = "pixel_patches", vision.patch_size**2
        patches = get_field(fields, name, torch.uint8, (-1, vision.in_channels, num_pixels))
        check_table(get_field(fields, "pixel_table", torch.float32, (vision.in_channels, 256)))
        num_patches = self.count(fields) * vision.spatial_merge_size**2
        if num_patches != len(patches):
            refuse(f"{grid_name(fields)} needs {num_patches} patches, but there are {len(patches)}")

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        visual = model.model.visual
        pixel_values = torch.cat([self.restore(fields, visual) for fields in batch])
        grids = torch.stack([fields[grid_name(fields)] for fields in batch])
        return self._embed(model, pixel_values, grids, self._geometries.get(visual, grids))

    def split(self, fields: Fields, max_count: int) -> list[Fields]:
        """Split a video between its pairs of frames, because they do not attend to each other."""
        if VIDEO_GRID not in fields:
            return [fields]
        frames, height, width = fields[VIDEO_GRID].tolist()
        per_frame = height * width // self._config.vision_config.spatial_merge_size**2
        num = max(1, max_count // per_frame)
        if num >= frames:
            return [fields]
        patches = torch.split(fields["video_patches"], num * height * width)
        return [
            {
                "video_patches": part,
                "pixel_table": fields["pixel_table"],
                VIDEO_GRID: torch.tensor([len(part) // (height * width), height, width]),
            }
            for part in patches
        ]

    def optimize_layers(self, model: Any, kernels: KernelSetting = "measured") -> None:
        from shared.vision.layers import optimize_qwen_vision

        optimize_qwen_vision(model.model.visual, kernels)

    def sample(self) -> Fields:
        vision = self._config.vision_config
        side = 2 * vision.spatial_merge_size
        num_pixels = vision.patch_size**2
        return {
            "pixel_patches": torch.zeros(side**2, vision.in_channels, num_pixels).to(torch.uint8),
            "pixel_table": torch.zeros(vision.in_channels, 256),
            "image_grid_thw": torch.tensor([1, side, side]),
        }

    def restore(self, fields: Fields, visual: PreTrainedModel | None = None) -> Tensor:
        """Return the processor's pixel_values, bit for bit; for `visual` see `look_up`.

        [num_patches, channels * frames * patch_height * patch_width]
        """
        if VIDEO_GRID in fields:
            return look_up(fields["video_patches"], fields["pixel_table"], visual).flatten(1)
        patches = fields["pixel_patches"]
        num_patches, channels, num_pixels = patches.shape
        frame = look_up(patches, fields["pixel_table"], visual)
        frames = self._config.vision_config.temporal_patch_size
        shape = (num_patches, channels, frames, num_pixels)
        return frame.view(num_patches, channels, 1, num_pixels).expand(shape).flatten(1)

    def _embed(
        self, model: Any, pixel_values: Tensor, grids: Tensor, geometry: Geometry
    ) -> list[Tensor]:
        return list(model.get_image_features(pixel_values, grids, **geometry).pooler_output)


class Qwen3Tower(QwenTower):
    """Qwen3-VL's tower: each embedding is followed by features of earlier layers (DeepStack)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_levels = len(self._config.vision_config.deepstack_visual_indexes)

    def _embed(
        self, model: Any, pixel_values: Tensor, grids: Tensor, geometry: Geometry
    ) -> list[Tensor]:
        return join_levels(model.get_image_features(pixel_values, grids, **geometry))


def join_levels(encoded: Any) -> list[Tensor]:
    """Return embeddings with the features of earlier layers after each of them."""
    levels = zip(encoded.pooler_output, *encoded.deepstack_features, strict=True)
    return [torch.cat(image_levels, dim=-1) for image_levels in levels]


class QwenAdapter(LanguageAdapter):
    """Positions in time, height and width (M-RoPE): the tokens of an item form a grid."""

    num_position_rows = 3

    def check(self, prompt: MediaPrompt) -> None:
        super().check(prompt)
        for item in prompt.items:
            grid = _GRIDS.get(item.modality)
            if grid is not None and grid_name(item.fields) != grid:
                refuse(f"an item of modality {item.modality!r} has {grid_name(item.fields)}")
            self._check_placement(item)
        _check_apart(sort_by_offset(prompt.items))

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        # The tokens of a sound have consecutive positions, like text.
        items = [item for item in sort_by_offset(prompt.items) if item.modality in _GRIDS]
        if not items:
            return None
        runs = (run for item in items for run in self._runs_of(item))
        return locate_grids(len(prompt.prompt_token_ids), runs)

    def _runs_of(self, item: MediaItem) -> Sequence[Run]:
        """Return the runs of the item's tokens. Here an item is one run in a grid."""
        frames, rows, columns = self._grid_of(item)
        return [GridRun(item.placeholder.offset, frames, rows, columns, self._step_of(item))]

    def _grid_of(self, item: MediaItem) -> tuple[int, int, int]:
        """Return the frames, rows and columns of the item's tokens."""
        config: Any = self.model.config
        merge = config.vision_config.spatial_merge_size
        frames, height, width = item.fields[grid_name(item.fields)].tolist()
        return frames, height // merge, width // merge

    def _step_of(self, item: MediaItem) -> float:
        """Return the number of positions from a pair of frames to the next one."""
        if SECONDS not in item.fields:
            return 1.0
        return float(item.fields[SECONDS]) * positions_per_second(self.model.config)

    def _check_placement(self, item: MediaItem) -> None:
        """Check the form of the item's placeholder, and its fields about time.

        Raises InvalidRequest.
        """
        if item.placeholder.is_embed is not None:
            refuse(f"the placeholder of {item.modality}s is one run of tokens in this model")
        if SECONDS in item.fields:
            check_seconds(item.fields)


class Qwen3VLAdapter(QwenAdapter):
    """Qwen3-VL's decoder, which adds further features of images to its first hidden states.

    There is text between the pairs of frames of a video, so each pair has the positions of an
    image.
    """

    def _runs_of(self, item: MediaItem) -> Sequence[Run]:
        _, rows, columns = self._grid_of(item)
        indexes = item.placeholder.embed_indexes()[:: rows * columns]
        return [GridRun(item.placeholder.offset + index, 1, rows, columns) for index in indexes]

    def _check_placement(self, item: MediaItem) -> None:
        if item.modality != VIDEO:
            super()._check_placement(item)
            return
        _, rows, columns = self._grid_of(item)
        indexes = item.placeholder.embed_indexes()
        starts = indexes[:: rows * columns]
        if indexes != [start + i for start in starts for i in range(rows * columns)]:
            refuse("a pair of frames is not one run of tokens")

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
        # The whole model computes these features from pixels, and does not accept computed ones.
        model: Any = self.model
        decoder = model.model.language_model
        hidden = decoder(
            inputs_embeds=embeddings,
            position_ids=positions[:, None],
            deepstack_visual_embeds=levels_for(decoder, deepstack),
            use_cache=False,
            **attention,
        ).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits


def levels_for(decoder: Any, deepstack: Tensor) -> list[Tensor]:
    """Return the levels of `deepstack`, and make the decoder add each of them to all rows.

    transformers selects rows by a mask instead, for which the host waits for a GPU.
    """
    decoder._deepstack_process = _add_level
    return list(deepstack)


def _add_level(hidden: Tensor, mask: None, level: Tensor) -> Tensor:
    return hidden + level


def grid_name(fields: Mapping[str, Any]) -> str:
    """Return the name of the field with an item's grid. It differs between videos and images."""
    return VIDEO_GRID if VIDEO_GRID in fields else IMAGE_GRID


def check_seconds(fields: Fields) -> None:
    """Raise InvalidRequest unless the fields have a valid duration of a pair of frames."""
    seconds = float(get_field(fields, SECONDS, torch.float32, ()))
    if not 0 <= seconds <= MAX_GRID_SECONDS:
        refuse(f"{SECONDS} is {seconds}, not between 0 and {MAX_GRID_SECONDS:g}")


def sort_by_offset(items: Sequence[MediaItem]) -> list[MediaItem]:
    return sorted(items, key=lambda item: item.placeholder.offset)


def _check_apart(items: Sequence[MediaItem]) -> None:
    for left, right in itertools.pairwise(items):
        if left.placeholder.offset + left.placeholder.length > right.placeholder.offset:
            refuse("the placeholders of two items overlap")


def _media(
    open_video: Callable[[Path, Any], MediaLayout | None],
) -> Mapping[Modality, MediaInput]:
    return {
        IMAGE: MediaInput(QwenImageLayout, placeholder="image_token_id"),
        VIDEO: MediaInput(open_video, placeholder="video_token_id"),
    }


def _open_video(folder: Path, config: Any) -> QwenVideoLayout | None:
    """Open the layout of Qwen2-VL or Qwen2.5-VL. Only Qwen2.5-VL has positions per second."""
    is_timed = hasattr(config.vision_config, "tokens_per_second")
    return (Qwen25VideoLayout if is_timed else QwenVideoLayout).open(folder, config)


FAMILIES = (
    ModelFamily(
        "Qwen2-VL",
        frozenset({"qwen2_vl", "qwen2_5_vl"}),
        decoders={
            "qwen2_vl_text": frozenset({"llama_like"}),
            "qwen2_5_vl_text": frozenset({"llama_like"}),
        },
        media=_media(_open_video),
        tower=QwenTower,
        language=QwenAdapter,
    ),
    ModelFamily(
        "Qwen3-VL",
        frozenset({"qwen3_vl", "qwen3_vl_moe"}),
        decoders={"qwen3_vl_text": frozenset({"llama_like"})},
        media=_media(Qwen3VideoLayout.open),
        tower=Qwen3Tower,
        language=Qwen3VLAdapter,
    ),
)
