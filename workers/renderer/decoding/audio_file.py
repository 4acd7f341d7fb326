"""Interface of sound readers, their limits, and conversion to one channel at one rate."""

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import soxr
from numpy.typing import NDArray

from shared.decoding.refusal import Refusal
from workers.renderer.decoding.messages import PIECE_SAMPLES, AudioProbe, DecodingLimits

MIN_RATE = 4_000
MAX_RATE = 192_000
MAX_CHANNELS = 8
# Features of a louder sound would not be finite numbers.
MAX_LOUDNESS = 2.0**24
QUALITY = "HQ"
"""Default quality of librosa, which the reference implementations of the audio models use."""


class AudioFile(Protocol):
    """A sound with a header within the limits. Every error is a Refusal."""

    probe: AudioProbe

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the samples as blocks of about a second, [samples, channels]."""
        ...


def check_header(rate: int, num_channels: int, num_samples: int, limits: DecodingLimits) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise Refusal(
            "too_large" if rate > MAX_RATE else "invalid",
            f"a sound of {rate} samples a second; the limits are {MIN_RATE} and {MAX_RATE}",
        )
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise Refusal(
            "too_large", f"a sound of {num_channels} channels is over the limit of {MAX_CHANNELS}"
        )
    check_duration(num_samples / rate, limits)


def check_duration(duration_s: float, limits: DecodingLimits) -> None:
    if duration_s > limits.max_audio_s:
        raise Refusal(
            "too_large",
            f"a sound of {duration_s:g} s is over the limit of {limits.max_audio_s:g} s",
        )


def read_mono(file: AudioFile, rate: int, limits: DecodingLimits) -> Iterator[NDArray[np.float32]]:
    """Yield all samples: the mean of the channels, resampled, in pieces of at most PIECE_SAMPLES.

    If the file has another rate, n samples become ceil(n * rate / file rate).
    """
    source_rate = file.probe.rate
    resampler = soxr.ResampleStream(source_rate, rate, 1, "float32", QUALITY)
    num_read = num_made = 0
    for block in file.blocks():
        num_read += len(block)
        check_duration(num_read / source_rate, limits)
        # The mean of one channel is the channel; computing it would only copy.
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.abs(mono).max(initial=0.0) <= MAX_LOUDNESS:
            raise Refusal("invalid", "the sound has samples that are not finite, or far too loud")
        samples = mono if rate == source_rate else resampler.resample_chunk(mono)
        num_made += len(samples)
        yield from _split(samples)
    if rate != source_rate:
        rest = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        num_missing = math.ceil(num_read * rate / source_rate) - num_made
        padded = np.zeros(max(num_missing, 0), np.float32)
        padded[: len(rest)] = rest[: len(padded)]
        yield from _split(padded)


def _split(samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(samples), PIECE_SAMPLES):
        yield samples[start : start + PIECE_SAMPLES]
