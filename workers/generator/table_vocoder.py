"""Vocoder without a neural network: a table has an envelope, a pitch and a voicing for each code.

Pulses at the pitch and noise are mixed according to the voicing, and shaped by the envelope in
steps of a quarter of a frame. Between the middles of frames all three are interpolated.

Any division of a speech into chunks gives the same bits. The phase of the pulses is a sum of
integers, the noise is a function of the sample's index, and every sample is a sum of the same
numbers in the same order: a chunk computes all steps that reach it, and these need two frames on
either side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.generator.core.vocoder import Chunk, Codes, Samples

Floats = NDArray[np.float64]

STEPS_PER_FRAME = 4
WINDOW_STEPS = 4
"""Length of the Hann window of a step. Four windows overlap, and their sum is 2."""
FFT_STEPS = 6.4
"""Length of a step's output. A filter's response reaches 1.2 steps beyond the window, 6 ms."""
REACH_STEPS = 3
"""Number of steps on either side of a chunk that reach it: their centers are within 3.2 steps."""
CONTEXT_FRAMES = 2
"""The first of these steps needs samples from 4.5 steps before the chunk on. They are in the second
half of the second frame before the chunk, so earlier frames do not change them."""
MIN_PULSE_VOICING = 0.3
"""Steps with a smaller voicing consist only of noise."""
BREATH_HZ, BREATH_RANGE_HZ, MAX_BREATH = 3500.0, 2500.0, 0.6
"""Above the first frequency, a part of the pulses is replaced by noise. The part grows over the
range to the maximum."""
FRAMES_AT_ONCE = 32
"""Limit on frames that are computed together: more frames save calls, but do not fit into the
cache."""
PHASES = 2**32
"""Phases of a period: the phase of a sample is a 32-bit integer."""


@dataclass(frozen=True, slots=True)
class VoiceTable:
    """Sound of each code."""

    sample_rate: int
    samples_per_frame: int
    band_hz: Floats
    """Centers of the bands, ascending, [num_bands]."""
    envelope: Floats
    """Natural logarithm of the gain at these centers, [num_codes, num_bands]. The excitation has
    power 1, and full scale is 1."""
    pitch_hz: Floats
    """0 for codes without a pitch, [num_codes]."""
    voicing: Floats
    """Share of the pulses in the power, [num_codes]."""


class TableVocoder:
    """Vocoder that computes sound from a table."""

    num_codebooks = 1
    min_left = min_right = CONTEXT_FRAMES
    num_missing = 0

    def __init__(self, table: VoiceTable) -> None:
        self.sample_rate = table.sample_rate
        self.samples_per_frame = table.samples_per_frame
        self.num_codes = len(table.pitch_hz)
        self._step = step = table.samples_per_frame // STEPS_PER_FRAME
        self._fft = round(FFT_STEPS * step)
        bin_hz = np.fft.rfftfreq(self._fft, 1 / table.sample_rate)
        self._log_gain = np.stack(
            [np.interp(bin_hz, table.band_hz, row) for row in table.envelope]
        )  # [num_codes, bins]
        self._pitch_hz, self._voicing = table.pitch_hz, table.voicing
        breath = np.clip((bin_hz - BREATH_HZ) / BREATH_RANGE_HZ, 0, MAX_BREATH)
        self._pulse_share = 1 - breath  # [bins]
        length = WINDOW_STEPS * step
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
        self._window = np.pad(hann, (self._fft - length) // 2)

    def carry(self, codes: Codes, position: int) -> int:
        """Return the phase at the middle of frame `position`. From there on, the pitch does not
        depend on earlier frames."""
        _, pitch_hz = self._voice(codes[None, : position + 1, 0])
        num_steps = position * STEPS_PER_FRAME + STEPS_PER_FRAME // 2
        return int(self._increments(pitch_hz)[0, :num_steps].sum()) * self._step % PHASES

    def synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        at_once = max(1, FRAMES_AT_ONCE // len(chunks[0].codes))
        parts = (chunks[n : n + at_once] for n in range(0, len(chunks), at_once))
        return [samples for part in parts for samples in self._synthesize(part)]

    def _synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        left, right = chunks[0].left, chunks[0].right
        codes = np.stack([chunk.codes[:, 0] for chunk in chunks])  # [num_chunks, num_frames]
        num_frames = codes.shape[1]
        voicing, pitch_hz = self._voice(codes)
        pulses = self._pulses(pitch_hz, np.array([c.carry for c in chunks], np.uint64))
        positions = np.array([chunk.position for chunk in chunks], np.uint64)
        noise = _noise(positions * self.samples_per_frame, num_frames * self.samples_per_frame)
        # The steps [begin, end) of the window reach the chunk.
        begin = max(0, left * STEPS_PER_FRAME - REACH_STEPS)
        end = (num_frames - right) * STEPS_PER_FRAME + REACH_STEPS
        steps = slice(begin, min(end, num_frames * STEPS_PER_FRAME))
        share = voicing[:, steps, None] * self._pulse_share
        shaped = self._gain(codes, steps) * (
            np.sqrt(share) * self._spectra(pulses, steps)
            + np.sqrt(1 - share) * self._spectra(noise, steps)
        )
        sound = self._overlapped(np.fft.irfft(shaped, self._fft))
        # The output of the first step begins half an FFT before its center.
        first = left * self.samples_per_frame + self._fft // 2
        first -= steps.start * self._step + self._step // 2
        num_samples = (num_frames - left - right) * self.samples_per_frame
        full_scale = sound[:, first : first + num_samples] * 32767
        return list(np.clip(np.rint(full_scale), -32768, 32767).astype(np.int16))

    def _voice(self, codes: NDArray[np.int32]) -> tuple[Floats, Floats]:
        """Return voicing and pitch of every step, [num_chunks, num_steps]; 0 without pulses."""
        before, after, weight = _neighbors(codes.shape[1])
        voicing = _between(self._voicing[codes], before, after, weight)
        pitch = self._pitch_hz[codes]
        low, high = pitch[:, before], pitch[:, after]
        both = (low > 0) & (high > 0)
        pitch_hz = np.where(both, (1 - weight) * low + weight * high, np.maximum(low, high))
        is_pulsed = (pitch_hz > 0) & (voicing > MIN_PULSE_VOICING)
        return np.where(is_pulsed, voicing, 0.0), np.where(is_pulsed, pitch_hz, 0.0)

    def _gain(self, codes: NDArray[np.int32], steps: slice) -> Floats:
        """Return the gain of the steps in `steps`, [num_chunks, num_steps, bins]."""
        before, after, weight = _neighbors(codes.shape[1])
        log_gain = self._log_gain[codes]
        gain: Floats = np.exp(_between(log_gain, before[steps], after[steps], weight[steps, None]))
        return gain

    def _increments(self, pitch_hz: Floats) -> NDArray[np.uint64]:
        """Return the increment of the phase for each sample of a step."""
        return np.rint(pitch_hz * (PHASES / self.sample_rate)).astype(np.uint64)

    def _pulses(self, pitch_hz: Floats, carries: NDArray[np.uint64]) -> Floats:
        """Return band-limited pulses of power 1, [num_chunks, num_samples].

        A pulse train with k harmonics is a Dirichlet kernel: 2 cos(x) + … + 2 cos(kx), where x is
        the phase, is sin((2k + 1) x / 2) / sin(x / 2) - 1.
        """
        summed = np.cumsum(np.repeat(self._increments(pitch_hz), self._step, axis=1), axis=1)
        middle = self.samples_per_frame // 2
        phase = (summed - summed[:, middle - 1, None] + carries[:, None]) % np.uint64(PHASES)
        half = phase.astype(np.float64) * (np.pi / PHASES)
        period_hz = np.where(pitch_hz > 0, pitch_hz, self.sample_rate)
        harmonics = np.repeat(np.floor(self.sample_rate / 2 / period_hz), self._step, axis=1)
        below = np.sin(half)
        is_peak = np.abs(below) < 1e-9
        ratio = np.sin((2 * harmonics + 1) * half) / np.where(is_peak, 1.0, below)
        train = np.where(is_peak, 2 * harmonics + 1, ratio) - 1
        level: Floats = np.repeat(np.sqrt(pitch_hz / self.sample_rate), self._step, axis=1)
        pulses: Floats = train * level
        return pulses

    def _spectra(self, excitation: Floats, steps: slice) -> NDArray[np.complex128]:
        """Return the spectra of windows around the steps, [num_chunks, num_steps, bins]."""
        # Silence surrounds a speech. Steps that reach a chunk do not reach other ends of its
        # context.
        padded = np.pad(excitation, ((0, 0), (self._fft // 2, self._fft // 2)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._fft, axis=1)
        centered = windows[:, self._step // 2 :: self._step][:, steps]
        return np.fft.rfft(centered * self._window)

    def _overlapped(self, pieces: Floats) -> Floats:
        """Return the sum of the steps' outputs, each one step after the previous one."""
        num_chunks, num_steps, _ = pieces.shape
        sound = np.zeros((num_chunks, (num_steps - 1) * self._step + self._fft))
        for number in range(num_steps):
            first = number * self._step
            sound[:, first : first + self._fft] += pieces[:, number]
        return sound * (2 / WINDOW_STEPS)


def _neighbors(num_frames: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return the two frames around each step, and the weight of the second for interpolation.

    A step lies between the middles of its two frames. Before the first middle and after the last
    middle, both are the same frame.
    """
    # Shifted by half a frame, so that a quotient counts the intervals between middles.
    shifted = np.arange(num_frames * STEPS_PER_FRAME) + STEPS_PER_FRAME // 2
    after = shifted // STEPS_PER_FRAME
    weight = (shifted % STEPS_PER_FRAME + 0.5) / STEPS_PER_FRAME
    return np.maximum(after - 1, 0), np.minimum(after, num_frames - 1), weight


def _between(
    values: Floats, before: NDArray[np.int64], after: NDArray[np.int64], weight: Floats
) -> Floats:
    """Interpolate values of frames, [num_chunks, num_frames, …]."""
    return (1 - weight) * values[:, before] + weight * values[:, after]


def _noise(first: NDArray[np.uint64], num_samples: int) -> Floats:
    """Return uniform noise of power 1 from each sample of `first` on, [num_chunks, num_samples].

    The generator is SplitMix64, which computes its n-th number without the previous ones.
    """
    index = first[:, None] + np.arange(num_samples, dtype=np.uint64)
    bits: NDArray[np.uint64] = np.multiply(index + np.uint64(1), np.uint64(0x9E3779B97F4A7C15))
    bits = np.multiply(bits ^ (bits >> np.uint64(30)), np.uint64(0xBF58476D1CE4E5B9))
    bits = np.multiply(bits ^ (bits >> np.uint64(27)), np.uint64(0x94D049BB133111EB))
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(11)).astype(np.float64) / 2**53
    noise: Floats = (uniform - 0.5) * math.sqrt(12.0)
    return noise
