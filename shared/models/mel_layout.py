"""Mel layout: log-mel features of a sound, bit for bit as transformers computes them with torch.

A sound is padded only as far as its last frames need, and not to the model's window of 30 or 300
seconds. All frames after a sound are equal, so one of them represents the rest. The settings come
from transformers' class. The arithmetic is here, because in a renderer, which starts without torch,
that class would use numpy, and the results of numpy differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.errors import ConfigError, InvalidMedia, InvalidRequest, MediaTooLarge
from shared.models.layout import PlannedLayout, check_processor_file, fingerprint
from shared.models.lazy_module import LazyModule
from shared.models.media import AudioProbe, SamplePlan
from shared.protocol.multimodal import FrameSampling

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

SAMPLE_RATE = 16_000
"""Samples per second of all supported feature extractors."""
NUM_FRAMES_BEHIND = 3
"""Number of frames that are kept after a sound: two may contain a part of it, and one is silent."""
MIN_PADDED_LEN = SAMPLE_RATE
"""Least number of samples to compute features from: products of few frames round differently."""

FRAMES = "audio_frames"
SOUND_FIELDS = ("input_features", FRAMES)

Samples = NDArray[np.float32]

# transformers leaves this function without types.
_load_feature_extractor: Any = AutoFeatureExtractor.from_pretrained


def count_tokens(num_frames: int) -> int:
    """Return the number of embeddings: a convolution and a mean each halve the frames."""
    return ((num_frames - 1) // 2 + 1) // 2


def count_chunked_tokens(num_frames: int, chunk_len: int) -> int:
    """Return the number of embeddings: three convolutions halve the frames of each chunk."""
    num_chunks, rest = divmod(num_frames, chunk_len)
    return num_chunks * -(-chunk_len // 8) + -(-rest // 8)


class SoundLayout(PlannedLayout[AudioProbe, SamplePlan, Samples]):
    """Fields of sounds that are not longer than a window."""

    def limit(self, probe: AudioProbe, sampling: FrameSampling, field: str) -> int | None:
        """Return the number of samples at which the request cuts the sound.

        Raises MediaTooLarge for a longer sound that the request does not cut.
        """
        if sampling.overflow == "cut":
            return self._num_window_samples
        if int(np.ceil(probe.seconds * SAMPLE_RATE)) > self._num_window_samples:
            raise self._too_long(probe.seconds, field)
        return None

    def collect(self, parts: Iterator[Samples], plan: SamplePlan, field: str) -> Samples:
        """Return all samples up to the window's length. The header may have declared fewer."""
        pieces, num_samples = [], 0
        for piece in parts:
            pieces.append(piece)
            num_samples += len(piece)
            if num_samples > self._num_window_samples:
                if plan.max_samples is None:
                    raise self._too_long(num_samples / SAMPLE_RATE, field)
                break
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        return samples[: self._num_window_samples]

    @property
    def _num_window_samples(self) -> int:
        return int(self.window_s * SAMPLE_RATE)

    def _too_long(self, seconds: float, field: str) -> MediaTooLarge:
        return MediaTooLarge(
            f"a sound of {seconds:.2f} seconds is over this model's limit of {self.window_s:g}"
            " seconds; with overflow 'cut' of an audio_url, the model uses the beginning",
            field=field,
        )


class MelLayout(SoundLayout):
    """Features of one sound.

    input_features float32 [num_bins, num_frames and up to NUM_FRAMES_BEHIND more]
    audio_frames   int64 [], the number of frames of the sound itself

    The extractor's output has the length of its window, and repeats the last of these frames.
    """

    metadata: tuple[str, ...] = (FRAMES,)

    def __init__(self, folder: Path, audio_config: Any) -> None:
        """Open the feature extractor of a model folder for an audio tower. Raises ConfigError."""
        self._extractor = _load_extractor(folder)
        self._hop_len: int = self._extractor.hop_length
        self._window_len: int = self._extractor.n_samples
        self._num_bins: int = audio_config.num_mel_bins
        self.window_s = self._window_len / SAMPLE_RATE
        self.num_window_frames: int = self._extractor.nb_max_frames
        """Number of frames in the extractor's output."""
        self.fingerprint = fingerprint(self._extractor)
        _check_settings(self._extractor, self._num_bins, folder)

    def count(self, num_frames: int) -> int:
        """Return the number of tokens of a sound in a prompt; 0 for a sound that is too short."""
        return count_tokens(num_frames)

    def plan(self, probe: AudioProbe, sampling: FrameSampling, field: str) -> SamplePlan:
        limit = self.limit(probe, sampling, field)
        num_samples = min(int(np.ceil(probe.seconds * SAMPLE_RATE)), self._window_len)
        num_frames = -(-num_samples // self._hop_len)
        return SamplePlan(SAMPLE_RATE, self.count(num_frames), limit)

    def pack(
        self, parts: Iterator[Samples], plan: SamplePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        samples = self.collect(parts, plan, field)
        num_frames, num_tokens = self._count(samples, field)
        features = self._extract(samples, num_frames)
        return self._fields_of(features, num_frames), num_tokens

    def outline(
        self, parts: Iterator[Samples], plan: SamplePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        # The header of a sound may be wrong, and some formats declare more samples than they have.
        num_frames, num_tokens = self._count(self.collect(parts, plan, field), field)
        return {"audio_frames": from_numpy(np.array(num_frames, np.int64))}, num_tokens

    def _count(self, samples: Samples, field: str) -> tuple[int, int]:
        """Return the numbers of frames and of embeddings. Raises InvalidMedia."""
        num_frames = -(-len(samples) // self._hop_len)
        if (num_tokens := self.count(num_frames)) < 1:
            raise InvalidMedia(
                f"a sound of {len(samples)} samples at {SAMPLE_RATE} Hz is too short: the model"
                f" needs at least {self._least_samples}",
                field=field,
            )
        return num_frames, num_tokens

    @property
    def _least_samples(self) -> int:
        """Number of samples of the shortest sound with an embedding."""
        return next(n for n in itertools.count() if self.count(n + 1) > 0) * self._hop_len + 1

    # -- for the wire of each family --------------------------------------------------------------

    def restore(self, fields: Mapping[str, TensorData]) -> tuple[NDArray[np.float32], int]:
        """Return the features of the extractor's whole window, and the sound's number of frames."""
        features = to_numpy(fields["input_features"])
        num_behind = self.num_window_frames - features.shape[1]
        whole = np.pad(features, ((0, 0), (0, num_behind)), mode="edge")
        return whole, int(to_numpy(fields["audio_frames"]))

    def shorten(
        self, features: NDArray[Any], num_frames: int, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the result of `pack` for features with the length of the sound or the window.

        Raises InvalidRequest for invalid features.
        """
        num_tokens = self.count(num_frames)
        if features.ndim != 2 or features.shape[0] != self._num_bins or num_tokens < 1:
            raise InvalidRequest(
                f"features {list(features.shape)} of {num_frames} frames do not describe a sound"
                f" in {self._num_bins} bins",
                field=field,
            )
        if not num_frames <= features.shape[1] <= self.num_window_frames:
            raise InvalidRequest(
                f"the features have {features.shape[1]} frames, not {num_frames} to"
                f" {self.num_window_frames}",
                field=field,
            )
        # A finite float64 may become infinite as a float32.
        with np.errstate(over="ignore"):
            values = features.astype(np.float32)
        if not np.issubdtype(features.dtype, np.floating) or not np.isfinite(values).all():
            raise InvalidRequest("the features are not finite floats", field=field)
        return self._fields_of(values, num_frames), num_tokens

    # -- details ----------------------------------------------------------------------------------

    def _fields_of(self, features: NDArray[np.float32], num_frames: int) -> dict[str, TensorData]:
        shortened = features[:, : num_frames + NUM_FRAMES_BEHIND]
        return {
            "input_features": from_numpy(np.ascontiguousarray(shortened)),
            "audio_frames": from_numpy(np.array(num_frames, np.int64)),
        }

    def _extract(self, samples: Samples, num_frames: int) -> NDArray[np.float32]:
        """Return the features [num_bins, at least num_frames + NUM_FRAMES_BEHIND]."""
        padded = torch.zeros(1, self._padded_len(num_frames))
        padded[0, : len(samples)] = torch.from_numpy(samples)
        num_points: int = self._extractor.n_fft
        window = torch.hann_window(num_points)
        spectrum = torch.stft(padded, num_points, self._hop_len, window=window, return_complex=True)
        power = (spectrum[..., :-1].abs() ** 2).contiguous()  # [1, num_points / 2 + 1, frames]
        filters = torch.from_numpy(self._extractor.mel_filters.astype(np.float32))
        levels = (filters.T @ power).clamp(min=1e-10).log10()
        levels = (torch.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0
        features: NDArray[np.float32] = levels[0].numpy()
        return features

    def _padded_len(self, num_frames: int) -> int:
        """Return the number of samples to compute features from."""
        # The last kept frame extends into the next frame.
        needed = (num_frames + NUM_FRAMES_BEHIND + 1) * self._hop_len
        return min(max(needed, MIN_PADDED_LEN), self._window_len)


def _load_extractor(folder: Path) -> Any:
    check_processor_file(folder)
    try:
        # The extractor is untyped; its output is checked by shape.
        extractor: Any = _load_feature_extractor(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no feature extractor: {error}", field="path") from error
    if (name := type(extractor).__name__) != "WhisperFeatureExtractor":
        raise ConfigError(
            f"{folder}: the feature extractor is a {name}; this model family needs a"
            " WhisperFeatureExtractor",
            field="path",
        )
    return extractor


def _check_settings(extractor: Any, num_bins: int, folder: Path) -> None:
    required = {
        "sampling_rate": SAMPLE_RATE,
        "feature_size": num_bins,
        "padding_value": 0.0,
        "padding_side": "right",
        # Noise would give one sound different features each time.
        "dither": 0.0,
    }
    for name, value in required.items():
        if (actual := getattr(extractor, name)) != value:
            raise ConfigError(
                f"{folder}: the feature extractor has {name} {actual!r}, not {value!r}",
                field="path",
            )
