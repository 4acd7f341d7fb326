"""LLaVA-NeXT-Video: some frames of a video as squares for a CLIP tower, pooled by twos.

Only videos are supported, because the family's image tiles are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from transformers import PreTrainedConfig

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, WireField
from shared.errors import ConfigError, InvalidMedia, InvalidRequest
from shared.models import wire_pixels
from shared.models.family import MediaInput, ModelFamily
from shared.models.frame_sampling import SamplingRule, sample_evenly_cut
from shared.models.frames import RESIZING, VideoSettings, fused_table, read_video_settings
from shared.models.layout import PlannedLayout, check_frame_ratio
from shared.models.lazy_module import LazyModule
from shared.models.media import Frame, FramePlan, VideoProbe
from shared.models.tower_adapter import (
    Fields,
    TowerAdapter,
    check_table,
    get_field,
    look_up,
    refuse,
)
from shared.protocol.multimodal import VIDEO, FrameSampling, content_hash

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    torch = LazyModule("torch")

# Number from the family's examples. The family's processor itself does not sample frames.
NUM_FRAMES = 8


class LlavaNextVideoLayout(PlannedLayout[VideoProbe, FramePlan, Frame]):
    """Squares from the middle of frames.

    pixels      uint8 [num_frames, channels, image_size, image_size]
    pixel_table float32 [channels, 256], the normalised value of every pixel value
    """

    def __init__(self, settings: VideoSettings, config: Any) -> None:
        self._table = from_numpy(fused_table(settings))
        self._rule = SamplingRule(num_frames=settings.num_frames or NUM_FRAMES, min_frames=1)
        self._side: int = config.vision_config.image_size
        self._tokens_per_frame = _count_pooled(config)
        self.fingerprint = content_hash(
            type(self).__qualname__,
            RESIZING,
            msgspec.json.encode(settings),
            self._side,
            self._tokens_per_frame,
        )

    def plan(self, probe: VideoProbe, sampling: FrameSampling, field: str) -> FramePlan:
        sampled = sample_evenly_cut(probe, sampling, self._rule, field)
        check_frame_ratio(probe, field)
        side, height, width = self._side, probe.height, probe.width
        wide = height <= width
        resized = (side, int(side * width / height)) if wide else (int(side * height / width), side)
        num_tokens = len(sampled.indexes) * self._tokens_per_frame
        return FramePlan(sampled.indexes, *resized, num_tokens, sampled.sampled_fps, crop=side)

    def pack(
        self, parts: Iterator[Frame], plan: FramePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        pixels = np.empty((len(plan.indexes), 3, self._side, self._side), np.uint8)
        num = 0
        for frame in parts:
            pixels[num] = frame
            num += 1
        if num != len(pixels):
            raise InvalidMedia(
                f"the video has {num} of the {len(pixels)} selected frames", field=field
            )
        return {"pixels": from_numpy(pixels), "pixel_table": self._table}, plan.num_tokens

    def outline(
        self, parts: Iterator[Frame], plan: FramePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        return {}, plan.num_tokens

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        pixels, table = to_numpy(fields["pixels"]), to_numpy(fields["pixel_table"])
        values = table[np.arange(len(table))[:, None, None], pixels]
        return {"pixel_values_videos": WireField(from_numpy(values), BatchedField())}

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        (values,) = wire_pixels.tensors_of(wire, ("pixel_values_videos",), field)
        num_frames = values.shape[0] if values.shape else 0
        shape = (num_frames, 3, self._side, self._side)
        wire_pixels.check_shape("pixel_values_videos", values, shape, field)
        if not num_frames:
            raise InvalidRequest("a video has at least one frame", field=field)
        pixels, table = wire_pixels.to_pixels(to_numpy(values), self._table, field)
        fields = {"pixels": from_numpy(pixels), "pixel_table": table}
        return fields, num_frames * self._tokens_per_frame


class LlavaNextVideoTower(TowerAdapter):
    """A CLIP tower with pooling and a projector, for the fields of `LlavaNextVideoLayout`."""

    modules = ("model.vision_tower", "model.multi_modal_projector", "model.vision_resampler")

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._tokens_per_frame = _count_pooled(config)

    def count(self, fields: Fields) -> int:
        return len(self._pixels_of(fields)) * self._tokens_per_frame

    def check(self, fields: Fields) -> None:
        if not len(self._pixels_of(fields)):
            refuse("a video has at least one frame")
        check_table(get_field(fields, "pixel_table", torch.float32, (3, 256)))

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        tower = model.model.vision_tower
        values = torch.cat([self.restore(fields, tower) for fields in batch])
        features = model.get_video_features(
            values[None],
            vision_feature_layer=self._config.vision_feature_layer,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
        ).pooler_output
        return list(features[0].split([self.count(fields) for fields in batch]))

    def split(self, fields: Fields, max_count: int) -> list[Fields]:
        """Split a video between its frames, because the tower processes each frame separately."""
        num = max(1, max_count // self._tokens_per_frame)
        parts = torch.split(fields["pixels"], num)
        return [{"pixels": part, "pixel_table": fields["pixel_table"]} for part in parts]

    def sample(self) -> Fields:
        side = self._config.vision_config.image_size
        pixels = torch.zeros((1, 3, side, side), dtype=torch.uint8)
        return {"pixels": pixels, "pixel_table": torch.zeros(3, 256)}

    def restore(self, fields: Fields, tower: PreTrainedModel | None = None) -> Tensor:
        """Return the processor's pixel values, bit for bit, in the shape of the pixels.

        For `tower` see `look_up`.
        """
        pixels = fields["pixels"]
        return look_up(pixels.flatten(2), fields["pixel_table"], tower).view(pixels.shape)

    def _pixels_of(self, fields: Fields) -> Tensor:
        side = self._config.vision_config.image_size
        return get_field(fields, "pixels", torch.uint8, (-1, 3, side, side))


def _count_pooled(config: Any) -> int:
    """Return the number of tokens of a frame. Raises ConfigError for other towers and poolings."""
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    pooling = config.spatial_pool_mode, config.spatial_pool_stride
    strategy = config.vision_feature_select_strategy
    if vision.model_type != "clip_vision_model" or strategy != "default":
        raise ConfigError(
            f"models.path: LLaVA-NeXT-Video is supported with a CLIP tower without its class token,"
            f" not with {vision.model_type!r} and {strategy!r}",
            field="models.path",
        )
    if pooling not in (("average", 2), ("max", 2)) or side % 2:
        # For an odd side, transformers counts another number of tokens than it pools.
        raise ConfigError(
            f"models.path: LLaVA-NeXT-Video is supported with sides of an even number of patches,"
            f" pooled by twos, not with {side} patches and {pooling}",
            field="models.path",
        )
    return int(side // 2) ** 2


def _open_layout(folder: Path, config: Any) -> LlavaNextVideoLayout:
    side: int = config.vision_config.image_size
    defaults = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    settings = read_video_settings(folder, **defaults)
    fits = settings is not None and (
        settings.do_center_crop is not False
        and settings.size.get("shortest_edge") == side
        and settings.crop_size == {"height": side, "width": side}
    )
    if settings is None or not fits:
        raise ConfigError(
            f"{folder}: the video processor does not return squares of {side} pixels, which the"
            " tower needs",
            field="path",
        )
    return LlavaNextVideoLayout(settings, config)


FAMILIES = (
    ModelFamily(
        "LLaVA-NeXT-Video",
        frozenset({"llava_next_video"}),
        media={VIDEO: MediaInput(_open_layout, placeholder="video_token_index")},
        tower=LlavaNextVideoTower,
    ),
)
