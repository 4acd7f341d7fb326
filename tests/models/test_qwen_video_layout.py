"""Pixels, grids and frames of videos against transformers' own processors.

Those need torchvision, which is no dependency; what they made of noise is in tests/recorded.
"""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.arrays import from_numpy
from shared.codec.tensors import to_torch
from shared.errors import ConfigError, InvalidMedia, InvalidRequest, MediaTooLarge
from shared.models.frame_sampling import SamplingRule, sample_by_step, sample_evenly
from shared.models.frames import resize_frame
from shared.models.media import FramePlan, VideoProbe
from shared.models.qwen_video import (
    GRID,
    SECONDS,
    TIMESTAMPS,
    Qwen3VideoLayout,
    Qwen25VideoLayout,
    QwenVideoLayout,
)
from shared.protocol.multimodal import FrameSampling

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "video_pixels.json").read_text())
CONFIG = SimpleNamespace(
    vision_start_token_id=1,
    video_token_id=2,
    vision_end_token_id=3,
    vision_config=SimpleNamespace(tokens_per_second=2),
    get_text_config=lambda: SimpleNamespace(max_position_embeddings=128_000),
)
ANY = FrameSampling(max_frames=768)
LAYOUTS = {"qwen2": QwenVideoLayout, "qwen2.5": Qwen25VideoLayout, "qwen3": Qwen3VideoLayout}


def layout(folder: Path, kind: str, settings: dict[str, Any]) -> QwenVideoLayout:
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    opened = LAYOUTS[kind].open(folder, CONFIG)
    assert opened is not None
    return opened


def noise(shape: list[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def sequence(frames: np.ndarray, fps: float = 4.0) -> VideoProbe:
    return VideoProbe(len(frames), fps, frames.shape[2], frames.shape[1], is_sequence=True)


@pytest.mark.parametrize(
    "case", [case for case in RECORDED["cases"] if case["kind"] in LAYOUTS], ids=str
)
def test_pixels_equal_the_processors_bit_for_bit(tmp_path: Path, case: Any) -> None:
    ours = layout(tmp_path, case["kind"], case["settings"])
    frames = noise(case["frames"], case["seed"])
    plan = ours.plan(sequence(frames), ANY, "field")
    fields, num_tokens = ours.pack((resize_frame(f, plan) for f in frames), plan, "field")
    patches, table = to_torch(fields["video_patches"]), to_torch(fields["pixel_table"])
    values = torch.stack([table[c][patches[:, c].long()] for c in range(3)], 1).flatten(1)
    assert list(values.shape) == case["shape"]
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == case["sha256"]
    assert to_torch(fields[GRID]).tolist() == case["grid"]
    assert num_tokens == plan.num_tokens == math.prod(case["grid"]) // 4


def theirs_by_step(total: int, fps: float, sampling: FrameSampling) -> list[int]:
    """The frames by the formula of Qwen2-VL's processor, within the video."""
    if sampling.num_frames is not None:
        num = round(sampling.num_frames / 2) * 2
    else:
        most = math.floor(min(768, total) / 2) * 2
        by_rate = max(total / fps * (sampling.fps or 2.0), 4)
        num = math.floor(min(by_rate, most, total) / 2) * 2
    if not 0 < num <= total:
        return []  # an error there
    return [min(i, total - 1) for i in torch.arange(0, total, total / num).int().tolist()]


def theirs_evenly(total: int, fps: float, sampling: FrameSampling) -> list[int]:
    num = sampling.num_frames
    if num is None:
        num = min(max(int(total / fps * (sampling.fps or 2.0)), 4), 768, total)
    frames: list[int] = np.linspace(0, total - 1, num).round().astype(int).tolist()
    return frames


rates = st.one_of(st.floats(1, 120), st.sampled_from([8, 23.976, 24, 25, 29.97, 30, 60]))


@given(
    st.one_of(st.integers(1, 12), st.integers(1, 2000)),
    rates,
    st.floats(0.1, 30) | st.none(),
    st.integers(1, 768) | st.none(),
)
def test_frames_equal_the_frames_of_the_processors(
    total: int, fps: float, asked_fps: float | None, num: int | None
) -> None:
    sampling = FrameSampling(None if num else asked_fps, num, 768)
    probe, rule = VideoProbe(total, fps, 8, 8), SamplingRule()
    sampled = sample_by_step(probe, sampling, rule, 2, "field")
    expected = theirs_by_step(total, fps, sampling)
    assert not expected or list(sampled.indexes) == expected
    assert list(sampled.indexes) == sorted(sampled.indexes)
    assert 0 <= sampled.indexes[0] <= sampled.indexes[-1] < total
    assert sampled.sampled_fps == pytest.approx(len(sampled.indexes) / total * fps)
    evenly = sample_evenly(probe, sampling, rule, "field").indexes
    expected = theirs_evenly(total, fps, sampling)
    if num is None or num <= total:
        assert list(evenly) == expected
    assert len(evenly) <= total


def test_a_request_may_not_ask_for_what_contradicts_itself() -> None:
    probe = VideoProbe(100, 10.0, 8, 8)
    for sample in (
        lambda probe, sampling: sample_by_step(probe, sampling, SamplingRule(), 2, "f"),
        lambda probe, sampling: sample_evenly(probe, sampling, SamplingRule(), "f"),
    ):
        with pytest.raises(InvalidRequest, match="not both"):
            sample(probe, FrameSampling(2.0, 4))
        frames = VideoProbe(9, 1.0, 8, 8, is_sequence=True)
        with pytest.raises(InvalidRequest, match="all frames"):
            sample(frames, FrameSampling(num_frames=4))
        with pytest.raises(MediaTooLarge, match="9 frames is over the limit of 8"):
            sample(frames, FrameSampling(max_frames=8))
        assert sample(frames, FrameSampling(fps=3.0)).fps == 3.0
        assert len(sample(probe, FrameSampling(fps=9.0, max_frames=6)).indexes) == 6
    with pytest.raises(InvalidMedia, match="num_frames"):
        sample_by_step(VideoProbe(9, None, 8, 8), ANY, SamplingRule(), 2, "f")


def test_a_video_of_one_frame_is_that_frame_twice(tmp_path: Path) -> None:
    for kind in LAYOUTS:
        ours = layout(tmp_path, kind, {})
        frames = noise([1, 70, 90], 0)
        plan = ours.plan(VideoProbe(1, 10.0, 90, 70), ANY, "field")
        assert plan.indexes == (0,)
        fields, _ = ours.pack((resize_frame(f, plan) for f in frames), plan, "field")
        patches = to_torch(fields["video_patches"]).unflatten(2, (2, -1))
        assert to_torch(fields[GRID])[0] == 1
        assert torch.equal(patches[:, :, 0], patches[:, :, 1])


def test_times_follow_from_the_sampled_frames(tmp_path: Path) -> None:
    probe = VideoProbe(24, 8.0, 112, 84)
    ours = layout(tmp_path, "qwen2.5", {})
    plan = ours.plan(probe, ANY, "field")
    assert plan.indexes == (0, 4, 8, 12, 16, 20)
    fields, _ = ours.pack((resize_frame(f, plan) for f in noise([6, 84, 112], 0)), plan, "f")
    assert to_torch(fields[SECONDS]).item() == 1.0
    ours = layout(tmp_path, "qwen3", {})
    plan = ours.plan(probe, FrameSampling(num_frames=3), "field")
    assert plan.indexes == (0, 12, 23)
    fields, _ = ours.pack((resize_frame(f, plan) for f in noise([3, 84, 112], 0)), plan, "f")
    assert to_torch(fields[TIMESTAMPS]).tolist() == [0.75, 23 / 8]
    grid = to_torch(fields[GRID]).tolist()
    placement = ours.place(fields, lambda text: [ord(c) for c in text])
    assert placement is not None
    run = [1, *[2] * (grid[1] * grid[2] // 4), 3]
    texts = [[ord(c) for c in text] for text in ("<0.8 seconds>", "<2.9 seconds>")]
    assert placement.token_ids == [*texts[0], *run, *texts[1], *run]
    assert placement.marks == (1, 3)


def test_a_video_that_ends_early_is_refused(tmp_path: Path) -> None:
    ours = layout(tmp_path, "qwen2", {})
    plan = FramePlan((0, 1, 2, 3), 56, 56, 8, 2.0)
    frames = noise([3, 56, 56], 0)
    with pytest.raises(InvalidMedia, match="3 of the 4 selected frames"):
        ours.pack((resize_frame(f, plan) for f in frames), plan, "field")


@pytest.mark.parametrize(
    "value", [{"resample": 2}, {"do_normalize": False}, {"patch_size": "many"}, []], ids=str
)
def test_other_settings_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="video_preprocessor_config"):
        layout(tmp_path, "qwen2", value)


def test_the_settings_of_images_need_not_suit_videos(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"max_pixels": 28 * 28 * 10}))
    opened = QwenVideoLayout.open(tmp_path, CONFIG)
    assert opened is not None
    assert opened.plan(VideoProbe(8, 2.0, 900, 900), ANY, "field").height == 84
    file.write_text(json.dumps({"resample": 2}))
    assert QwenVideoLayout.open(tmp_path, CONFIG) is None


def test_settings_change_the_fingerprint(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"fps": 1}, {"patch_size": 7}, {"max_pixels": 50_000}]
    prints = {
        layout(tmp_path, kind, settings).fingerprint for settings in variants for kind in LAYOUTS
    }
    assert len(prints) == len(variants) * len(LAYOUTS)
    nested = {"video_processor": {"fps": 1}}
    (tmp_path / "processor_config.json").write_text(msgspec.json.encode(nested).decode())
    assert layout(tmp_path, "qwen2", {}).fingerprint in prints


@pytest.mark.parametrize(
    ("fps", "message"),
    [
        # Nine steps from the first pair of frames to the last, at two positions a second.
        (2**-12, "reach position 147456, but the model's positions end at 127999"),
        (1e-9, "second_per_grid_ts is 2e\\+09, not between 0 and 1e\\+06"),
        (5e-324, "second_per_grid_ts is inf"),
    ],
)
def test_a_video_of_more_time_than_the_model_has_positions_is_refused_before_it_is_decoded(
    tmp_path: Path, fps: float, message: str
) -> None:
    ours = layout(tmp_path, "qwen2.5", {})
    probe = VideoProbe(20, None, 112, 84, is_sequence=True)
    assert ours.plan(probe, FrameSampling(fps=2 / 7111, max_frames=20), "field").num_tokens
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours.plan(probe, FrameSampling(fps=fps, max_frames=20), "field")
    assert caught.value.field == "field"


@pytest.mark.parametrize("seconds", [7112.0, 1e6, 2e6, -1.0, math.nan, math.inf, -math.inf])
def test_a_processed_video_of_more_time_than_the_model_has_positions_is_refused(
    tmp_path: Path, seconds: float
) -> None:
    ours = layout(tmp_path, "qwen2.5", {})
    frames = noise([20, 56, 56], 0)
    plan = ours.plan(sequence(frames), ANY, "field")
    fields, _ = ours.pack((resize_frame(f, plan) for f in frames), plan, "field")
    wire = ours.to_wire(fields | {SECONDS: from_numpy(np.array(7111, np.float32))})
    assert ours.from_wire(wire, "field")
    wire = ours.to_wire(fields | {SECONDS: from_numpy(np.array(seconds, np.float32))})
    with pytest.raises(InvalidRequest, match=SECONDS) as caught:
        ours.from_wire(wire, "field")
    assert caught.value.field == "field"
