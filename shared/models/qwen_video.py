"""Video layouts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches over two frames each, in a grid."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, FlatField, WireField
from shared.errors import InvalidMedia, InvalidRequest
from shared.models import wire_pixels
from shared.models.frame_sampling import SampledFrames, SamplingRule, sample_by_step, sample_evenly
from shared.models.frames import RESIZING, VideoSettings, fused_table, read_video_settings
from shared.models.layout import PlannedLayout, check_frame_ratio
from shared.models.media import Frame, FramePlan, VideoProbe
from shared.models.reach import check_time, positions_per_second
from shared.protocol.multimodal import FrameSampling, Placement, content_hash

GRID = "video_grid_thw"
SECONDS = "second_per_grid_ts"
TIMESTAMPS = "timestamps"


class QwenVideoLayout(PlannedLayout[VideoProbe, FramePlan, Frame]):
    """Patches of a video and their grid, for Qwen2-VL.

    video_patches  uint8 [num_patches, channels, frames * patch_height * patch_width]
    pixel_table    float32 [channels, 256], the normalised value of every pixel value
    video_grid_thw int64 [3], in patches: pairs of frames, rows, columns

    The processor's output is `pixel_table[channel, video_patches]`.
    """

    metadata: tuple[str, ...] = (GRID,)
    sends_values = False
    """Whether vLLM's engine accepts normalised values instead of 8-bit pixels."""
    _defaults: Mapping[str, Any] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "max_video_tokens": 128_000,
    }

    @classmethod
    def open(cls, folder: Path, config: Any) -> Self | None:
        """Return the layout of a model folder; None if it does not support videos.

        Raises ConfigError.
        """
        settings = read_video_settings(folder, **cls._defaults)
        return None if settings is None else cls(settings, config)

    def __init__(self, settings: VideoSettings, config: Any) -> None:
        self._settings = settings
        self._table = from_numpy(fused_table(settings))
        self._rule = SamplingRule(
            settings.fps or 2.0, settings.num_frames, settings.min_frames, settings.max_frames
        )
        self._min_pixels, self._max_pixels = self._bounds(settings)
        self.fingerprint = content_hash(
            type(self).__qualname__, RESIZING, msgspec.json.encode(settings)
        )

    def plan(self, probe: VideoProbe, sampling: FrameSampling, field: str) -> FramePlan:
        sampled = self._sample(probe, sampling, field)
        check_frame_ratio(probe, field)
        height, width = self._size(len(sampled.indexes), probe.height, probe.width)
        settings = self._settings
        num_pairs = -(-len(sampled.indexes) // settings.temporal_patch_size)
        cells = height * width // settings.patch_size**2 // settings.merge_size**2
        times = tuple(index / sampled.fps for index in sampled.indexes)
        return FramePlan(
            sampled.indexes, height, width, num_pairs * cells, sampled.sampled_fps, times
        )

    def pack(
        self, parts: Iterator[Frame], plan: FramePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        settings = self._settings
        per_pair, side = settings.temporal_patch_size, settings.patch_size
        num_pairs, rows, columns = self._grid(plan)
        patches = np.empty((num_pairs, rows * columns, 3, per_pair * side**2), np.uint8)
        pair = np.empty((per_pair, 3, plan.height, plan.width), np.uint8)
        num = 0
        for frame in parts:
            pair[num % per_pair] = frame
            num += 1
            if num % per_pair == 0:
                patches[num // per_pair - 1] = self._cut(pair)
        if num != len(plan.indexes):
            raise InvalidMedia(
                f"the video has {num} of the {len(plan.indexes)} selected frames", field=field
            )
        if left := num % per_pair:
            # The last frame is repeated.
            pair[left:] = pair[left - 1]
            patches[-1] = self._cut(pair)
        fields = {
            "video_patches": from_numpy(patches.reshape(-1, *patches.shape[2:])),
            "pixel_table": self._table,
        }
        metadata, num_tokens = self.outline(parts, plan, field)
        return fields | metadata, num_tokens

    def outline(
        self, parts: Iterator[Frame], plan: FramePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        grid = from_numpy(np.array(self._grid(plan), np.int64))
        return {GRID: grid, **self._times(plan)}, plan.num_tokens

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        rows: NDArray[Any] = to_numpy(fields["video_patches"])
        if self.sends_values:
            rows = wire_pixels.to_values(rows, fields["pixel_table"])
        flat, kind = rows.reshape(len(rows), -1), FlatField([[[0, len(rows), None]]])
        return {
            "pixel_values_videos": WireField(from_numpy(flat), kind),
            GRID: WireField(fields[GRID], BatchedField(keep_on_cpu=True)),
        }

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        names = ("pixel_values_videos", GRID, *self._time_names())
        rows, grid, *times = wire_pixels.tensors_of(wire, names, field)
        shape = self._check_grid(grid, field)
        settings, num_patches = self._settings, math.prod(shape)
        per_patch = settings.temporal_patch_size * settings.patch_size**2
        wire_pixels.check_shape("pixel_values_videos", rows, (num_patches, 3 * per_patch), field)
        values = to_numpy(rows).reshape(num_patches, 3, per_patch)
        pixels, table = wire_pixels.to_pixels(values, self._table, field)
        fields = {
            "video_patches": from_numpy(pixels),
            "pixel_table": table,
            GRID: grid,
            **dict(zip(self._time_names(), times, strict=True)),
        }
        return fields, num_patches // settings.merge_size**2

    def _grid(self, plan: FramePlan) -> tuple[int, int, int]:
        """Return the numbers of pairs of frames, of rows of patches, and of columns of patches."""
        settings = self._settings
        num_pairs = -(-len(plan.indexes) // settings.temporal_patch_size)
        return num_pairs, plan.height // settings.patch_size, plan.width // settings.patch_size

    def _cut(self, pair: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the patches of `temporal_patch_size` frames, in the order of the processor."""
        side, merge = self._settings.patch_size, self._settings.merge_size
        num, channels, height, width = pair.shape
        grid = pair.reshape(
            num, channels, height // side // merge, merge, side, width // side // merge, merge, side
        )
        cut = grid.transpose(2, 5, 3, 6, 1, 0, 4, 7)
        return cut.reshape(height * width // side**2, channels, num * side**2)

    def _bounds(self, settings: VideoSettings) -> tuple[int, int]:
        # Older files have the limits in pixels.
        least = settings.min_pixels or settings.size.get("shortest_edge")
        most = settings.max_pixels or settings.size.get("longest_edge")
        sizes = self._defaults["size"]
        return least or sizes["shortest_edge"], most or sizes["longest_edge"]

    def _sample(self, probe: VideoProbe, sampling: FrameSampling, field: str) -> SampledFrames:
        multiple = self._settings.temporal_patch_size
        return sample_by_step(probe, sampling, self._rule, multiple, field)

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width of resized frames, by the processor's rule for images."""
        settings = self._settings
        factor, most = settings.patch_size * settings.merge_size, self._max_pixels
        if settings.cap_pixels_per_frame:
            total = int((settings.max_video_tokens or 0) * factor * factor * 0.9)
            share = total * settings.temporal_patch_size // num_frames
            most = max(min(most, share), int(self._min_pixels * 1.05))
        return fit_size(1, 1, height, width, factor, self._min_pixels, most)

    def _times(self, plan: FramePlan) -> dict[str, TensorData]:
        """Return the fields about time."""
        return {}

    def _time_names(self) -> tuple[str, ...]:
        return self.metadata[1:]

    def _check_grid(self, tensor: TensorData, field: str) -> tuple[int, int, int]:
        wire_pixels.check_shape(GRID, tensor, (3,), field)
        if tensor.dtype != "int64":
            raise InvalidRequest(f"{GRID} must be int64", field=field)
        frames, height, width = map(int, to_numpy(tensor))
        merge = self._settings.merge_size
        if min(frames, height, width) < 1 or height % merge or width % merge:
            raise InvalidRequest(
                f"{GRID} is {[frames, height, width]}; rows and columns must be multiples of"
                f" {merge}",
                field=field,
            )
        return frames, height, width


class Qwen25VideoLayout(QwenVideoLayout):
    """Layout of Qwen2.5-VL, with positions that depend on the rate.

    second_per_grid_ts float32 [], seconds of two frames
    """

    metadata: tuple[str, ...] = (GRID, SECONDS)

    def __init__(self, settings: VideoSettings, config: Any) -> None:
        super().__init__(settings, config)
        self._num_positions: int = config.get_text_config().max_position_embeddings
        self._positions_per_s = positions_per_second(config)

    def plan(self, probe: VideoProbe, sampling: FrameSampling, field: str) -> FramePlan:
        plan = super().plan(probe, sampling, field)
        self._check_time(self._grid(plan)[0], self._seconds_of(plan), field)
        return plan

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        seconds = WireField(fields[SECONDS], BatchedField(keep_on_cpu=True))
        # vLLM writes the fields in the order of their names.
        return dict(sorted({**super().to_wire(fields), SECONDS: seconds}.items()))

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        fields, num_tokens = super().from_wire(wire, field)
        seconds = fields[SECONDS]
        wire_pixels.check_shape(SECONDS, seconds, (), field)
        if seconds.dtype != "float32":
            raise InvalidRequest(f"{SECONDS} must be float32", field=field)
        self._check_time(int(to_numpy(fields[GRID])[0]), float(to_numpy(seconds)), field)
        return fields, num_tokens

    def _times(self, plan: FramePlan) -> dict[str, TensorData]:
        return {SECONDS: from_numpy(np.array(self._seconds_of(plan), np.float32))}

    def _seconds_of(self, plan: FramePlan) -> float:
        # An invalid rate becomes infinite seconds, which are refused.
        return self._settings.temporal_patch_size / plan.fps if plan.fps > 0 else math.inf

    def _check_time(self, num_pairs: int, seconds: float, field: str) -> None:
        check_time(num_pairs, seconds, self._positions_per_s, self._num_positions, field)


class Qwen3VideoLayout(QwenVideoLayout):
    """Layout of Qwen3-VL, where each pair of frames is a run of tokens after its time.

    timestamps float64 [num_pairs], in seconds
    """

    metadata = (GRID, TIMESTAMPS)
    _defaults: Mapping[str, Any] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "patch_size": 16,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "max_video_tokens": 768,
        "fps": 2.0,
    }

    def __init__(self, settings: VideoSettings, config: Any) -> None:
        super().__init__(settings, config)
        self._start, self._pad, self._end = (
            int(getattr(config, name))
            for name in ("vision_start_token_id", "video_token_id", "vision_end_token_id")
        )
        self.embed_ids = (self._pad,)

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement:
        _, height, width = map(int, to_numpy(metadata[GRID]))
        run = [self._pad] * (height * width // self._settings.merge_size**2)
        token_ids: list[int] = []
        for seconds in to_numpy(metadata[TIMESTAMPS]):
            token_ids += [*encode(f"<{seconds:.1f} seconds>"), self._start, *run, self._end]
        # The marks are replaced, as in the model's training. transformers 5.23 keeps them around
        # the whole video.
        return Placement(token_ids, self.embed_ids, marks=(self._start, self._end))

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        times = WireField(fields[TIMESTAMPS], BatchedField(keep_on_cpu=True), is_list=True)
        return dict(sorted({**super().to_wire(fields), TIMESTAMPS: times}.items()))

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        fields, num_tokens = super().from_wire(wire, field)
        times, num_pairs = fields[TIMESTAMPS], int(to_numpy(fields[GRID])[0])
        wire_pixels.check_shape(TIMESTAMPS, times, (num_pairs,), field)
        if times.dtype != "float64" or not np.isfinite(to_numpy(times)).all():
            raise InvalidRequest(f"{TIMESTAMPS} must be finite and float64", field=field)
        return fields, num_tokens

    def _sample(self, probe: VideoProbe, sampling: FrameSampling, field: str) -> SampledFrames:
        return sample_evenly(probe, sampling, self._rule, field)

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        settings = self._settings
        factor, most = settings.patch_size * settings.merge_size, self._max_pixels
        if settings.cap_pixels_per_frame:
            share = min((settings.max_video_tokens or 0) * factor**2, most // num_frames)
            most = max(share, int(self._min_pixels * 1.05)) * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        per_pair = settings.temporal_patch_size
        # transformers refuses a single frame. Here it becomes the first frame of a pair.
        num_frames = max(num_frames, per_pair)
        return fit_size(num_frames, per_pair, height, width, factor, self._min_pixels, most)

    def _times(self, plan: FramePlan) -> dict[str, TensorData]:
        per_pair = self._settings.temporal_patch_size
        times = [*plan.times, *[plan.times[-1]] * (-len(plan.times) % per_pair)]
        pairs = [(times[i] + times[i + per_pair - 1]) / 2 for i in range(0, len(times), per_pair)]
        return {TIMESTAMPS: from_numpy(np.array(pairs, np.float64))}


def fit_size(
    num_frames: int, multiple: int, height: int, width: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """Return a height and a width that are multiples of `factor`, near the given size.

    The number of frames is rounded to a `multiple`, and the pixels of all frames are between
    `least` and `most`. The order of operations is the same as in transformers where it affects
    rounding.
    """
    fitted = round(height / factor) * factor, round(width / factor) * factor
    total = round(num_frames / multiple) * multiple * fitted[0] * fitted[1]
    if total > most:
        shrink = math.sqrt((num_frames * height * width) / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if total < least:
        grow = math.sqrt(least / (num_frames * height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return fitted
