"""Spectral envelope and pitch of recorded speech, 50 frames a second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ops.training.audio import Floats, Wave, mel_matrix, mel_points

# espeak-ng writes 22,050 samples a second. A frame of 20 ms is a whole number of them.
RECORDED_RATE = 22_050

FRAME_RATE = 50
HOP = RECORDED_RATE // FRAME_RATE
NUM_BANDS = 64
LOWEST_HZ, HIGHEST_HZ = 60.0, 11000.0
FFT = 1024
WINDOW = 2 * HOP
PITCH_WINDOW, PITCH_FFT = 1024, 2048
LOWEST_PITCH, HIGHEST_PITCH = 60.0, 400.0
# Smoothing over about twice the pitch, so that the envelope shows the mouth and not the pulses.
SMOOTHING_HZ = 250.0
FLOOR = 1e-4
VOICED_STRENGTH = 0.55
AUDIBLE = -6.0


BAND_HZ = mel_points(NUM_BANDS, LOWEST_HZ, HIGHEST_HZ)
BANDS = mel_matrix(BAND_HZ, RECORDED_RATE, FFT, fewest_hz=RECORDED_RATE / FFT)


@dataclass(frozen=True, slots=True)
class Features:
    """Measurements of each frame of an utterance."""

    # Natural log of the gain that gives noise of variance 1 the power of the speech.
    envelope: Floats
    # Hz, 0 where the frame is not voiced.
    pitch: Floats
    # The share of the power that repeats with the pitch.
    voicing: Floats


def frames_of(wave: Wave, size: int) -> Floats:
    """Windows of `size` samples around the middles of the frames."""
    num_frames = -(-len(wave) // HOP)
    before = (size - HOP) // 2
    padded = np.pad(wave, (before, num_frames * HOP + size - len(wave)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)[::HOP]
    return np.asarray(windows[:num_frames] * np.hanning(size), np.float32)


def envelope_of(wave: Wave) -> Floats:
    window_power = float((np.hanning(WINDOW) ** 2).sum())
    power = np.abs(np.fft.rfft(frames_of(wave, WINDOW), FFT, axis=1)) ** 2 / window_power
    taps = np.hanning(round(SMOOTHING_HZ / (RECORDED_RATE / FFT)) + 2)[1:-1]
    half = len(taps) // 2
    mirrored = np.pad(power, ((0, 0), (half, len(taps) - 1 - half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, len(taps), axis=1)
    smooth = windows @ (taps / taps.sum())
    return np.asarray(0.5 * np.log(smooth @ BANDS.T + FLOOR**2), np.float32)


def median_of_three(values: Floats) -> Floats:
    around = np.pad(values, 1)
    return np.asarray(np.median([around[:-2], around[1:-1], around[2:]], axis=0), np.float32)


def pitch_of(wave: Wave, envelope: Floats) -> tuple[Floats, Floats]:
    """Pitch and voicing by autocorrelation, made independent of the window's own fading."""
    windows = frames_of(wave, PITCH_WINDOW)
    power = np.abs(np.fft.rfft(windows, PITCH_FFT, axis=1)) ** 2
    window = np.abs(np.fft.rfft(np.hanning(PITCH_WINDOW), PITCH_FFT)) ** 2
    fading = np.fft.irfft(window)
    shortest, longest = (int(RECORDED_RATE / hz) for hz in (HIGHEST_PITCH, LOWEST_PITCH))
    likeness = np.fft.irfft(power, axis=1)[:, :longest]
    likeness = likeness / (likeness[:, :1] + 1e-4) / (fading[:longest] / fading[0])
    # Twice a period fits as well as the period itself; shorter ones get a small advantage.
    favoured = likeness[:, shortest:] - 0.0004 * np.arange(shortest, longest)
    lag = shortest + favoured.argmax(axis=1)
    strength = likeness[np.arange(len(lag)), lag]
    is_voiced = (strength > VOICED_STRENGTH) & (envelope.mean(axis=1) > AUDIBLE)
    pitch = median_of_three(np.where(is_voiced, RECORDED_RATE / lag, 0).astype(np.float32))
    voicing = np.where(pitch > 0, np.clip(strength, 0, 1), 0)
    return pitch, voicing.astype(np.float32)


def features_of(wave: Wave) -> Features:
    envelope = envelope_of(wave)
    return Features(envelope, *pitch_of(wave, envelope))


def cepstra(envelopes: Floats, num: int) -> Floats:
    """The first `num` terms of the orthonormal cosine transform of each row."""
    size = envelopes.shape[1]
    angles = np.pi / size * np.outer(np.arange(num), np.arange(size) + 0.5)
    basis = np.sqrt(2 / size) * np.cos(angles)
    basis[0] /= np.sqrt(2)
    return np.asarray(envelopes @ basis.T, np.float32)
