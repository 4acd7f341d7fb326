"""Frame sampling: selects the frames of a video for a model, by the rule of its family.

The rules are the same as in transformers' video processors, except for short videos. There,
transformers returns indexes after the last frame, or fails. Here such an index becomes the last
frame, and a video has at least one frame.
"""

from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidMedia, InvalidRequest, MediaTooLarge
from shared.models.media import VideoProbe
from shared.protocol.multimodal import FrameSampling

# transformers assumes this rate if a video has none.
ASSUMED_FPS = 24.0


@dataclass(frozen=True, slots=True)
class SampledFrames:
    indexes: tuple[int, ...]
    """Ascending; the last one may repeat."""
    fps: float
    """Rate of the frames in the file, so that index / fps is a frame's time."""
    sampled_fps: float
    """Rate of the sampled frames."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Settings of a processor that determine the number of sampled frames."""

    fps: float = 2.0
    num_frames: int | None = None
    """Number of frames instead of a rate, for requests that set neither."""
    min_frames: int = 4
    max_frames: int = 768


def sample_by_step(
    probe: VideoProbe, sampling: FrameSampling, rule: SamplingRule, multiple: int, field: str
) -> SampledFrames:
    """Sample at equal steps from the first frame on, as Qwen2-VL and Qwen2.5-VL do.

    The number of frames is a multiple of `multiple`, if rounding does not add one. Raises a
    RequestError naming `field`.
    """
    check_sampling(probe, sampling, field)
    if probe.is_sequence:
        return _take_all(probe, sampling, rule, field)
    total, limit = probe.num_frames, _limit(sampling, rule)
    num = _requested_num(sampling, rule)
    if num is not None:
        num_wanted = min(round(num / multiple) * multiple, _floor(min(limit, total), multiple))
    elif probe.fps is None:
        raise InvalidMedia("a video without times needs num_frames", field=field)
    else:
        by_rate = max(total / probe.fps * _requested_fps(sampling, rule), rule.min_frames)
        num_wanted = _floor(min(by_rate, _floor(min(limit, total), multiple)), multiple)
    step = total / max(num_wanted, 1)
    # In float64, rounded to float32: the result of torch.arange depends on the width of the CPU's
    # registers for a video with tens of thousands of frames.
    indexes = (np.arange(int(np.ceil(total / step))) * step).astype(np.float32).astype(np.int64)
    return _sampled(probe, np.minimum(indexes, total - 1), probe.fps)


def sample_evenly(
    probe: VideoProbe, sampling: FrameSampling, rule: SamplingRule, field: str
) -> SampledFrames:
    """Sample from the first to the last frame at equal distances, rounded, as Qwen3-VL does.

    Raises a RequestError naming `field`.
    """
    check_sampling(probe, sampling, field)
    if probe.is_sequence:
        return _take_all(probe, sampling, rule, field)
    return _sampled(probe, _even_places(probe, sampling, rule).round(), probe.fps)


def sample_evenly_cut(
    probe: VideoProbe, sampling: FrameSampling, rule: SamplingRule, field: str
) -> SampledFrames:
    """Sample like `sample_evenly`, but truncate fractions, as LLaVA-NeXT-Video's examples do.

    Raises a RequestError naming `field`.
    """
    check_sampling(probe, sampling, field)
    if probe.is_sequence:
        return _take_all(probe, sampling, rule, field)
    return _sampled(probe, _even_places(probe, sampling, rule), probe.fps)


def _even_places(probe: VideoProbe, sampling: FrameSampling, rule: SamplingRule) -> "np.ndarray":
    """Return equidistant positions from the first to the last frame, in frames."""
    total = probe.num_frames
    num = _requested_num(sampling, rule)
    if num is None:
        by_rate = int(total / (probe.fps or ASSUMED_FPS) * _requested_fps(sampling, rule))
        num = max(by_rate, rule.min_frames)
    return np.linspace(0, total - 1, min(num, _limit(sampling, rule), total))


def check_sampling(probe: VideoProbe, sampling: FrameSampling, field: str) -> None:
    """Raise InvalidRequest for sampling parameters that contradict each other or the video."""
    if sampling.num_frames is not None and sampling.fps is not None:
        raise InvalidRequest("set fps or num_frames of a video, not both", field=field)
    if probe.is_sequence and sampling.num_frames is not None:
        raise InvalidRequest(
            "num_frames has no effect: all frames of a video/jpeg sequence are used", field=field
        )


def _take_all(
    probe: VideoProbe, sampling: FrameSampling, rule: SamplingRule, field: str
) -> SampledFrames:
    """Take all frames of a sequence. Its rate is only in the request."""
    limit = _limit(sampling, rule)
    if probe.num_frames > limit:
        raise MediaTooLarge(
            f"a sequence of {probe.num_frames} frames is over the limit of {limit}", field=field
        )
    return _sampled(probe, np.arange(probe.num_frames), sampling.fps or probe.fps)


def _sampled(probe: VideoProbe, indexes: "np.ndarray", fps: float | None) -> SampledFrames:
    rate = fps or ASSUMED_FPS
    sampled_fps = rate if fps is None else len(indexes) / probe.num_frames * rate
    return SampledFrames(tuple(int(index) for index in indexes), rate, sampled_fps)


def _limit(sampling: FrameSampling, rule: SamplingRule) -> int:
    return min(sampling.max_frames or rule.max_frames, rule.max_frames)


def _requested_num(sampling: FrameSampling, rule: SamplingRule) -> int | None:
    return sampling.num_frames or (rule.num_frames if sampling.fps is None else None)


def _requested_fps(sampling: FrameSampling, rule: SamplingRule) -> float:
    return rule.fps if sampling.fps is None else sampling.fps


def _floor(number: float, multiple: int) -> int:
    return int(number // multiple) * multiple
