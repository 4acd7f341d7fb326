"""Synthetic sounds for the training of the demo with audio input."""

import numpy as np
import pytest

from ops.training.audio import Wave
from ops.training.hearing.sounds import HIGH_HZ, MAX_BEEPS, MAX_S, RATE, beeps, in_a_room
from ops.training.hearing.speech import stretch


def loudest_hz(samples: Wave) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))


@pytest.mark.parametrize("high", [False, True])
def test_rows_of_beeps_fit_and_have_a_sound(high: bool) -> None:
    rng = np.random.default_rng(3)
    for number in range(1, MAX_BEEPS + 1):
        for _ in range(20):
            row = beeps(rng, number, high)
            sound = in_a_room(rng, row)
            assert row.dtype == sound.dtype == np.float32
            assert len(row) < len(sound) <= MAX_S * RATE
            assert np.isfinite(sound).all()
            assert 0 < np.abs(sound).max() < 2
            assert np.abs(row).max() > 0.01


def test_high_beeps_have_nothing_below_their_pitch() -> None:
    rng = np.random.default_rng(4)
    for _ in range(40):
        spectrum = np.abs(np.fft.rfft(beeps(rng, 1, high=True))) ** 2
        hz = np.linspace(0, RATE / 2, len(spectrum))
        assert spectrum[hz < 0.5 * HIGH_HZ[0]].sum() < 0.3 * spectrum.sum()


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.35])
def test_slower_speech_keeps_its_pitch(factor: float) -> None:
    samples = np.asarray(np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE), np.float32)
    slower = stretch(samples, factor)
    assert len(slower) == pytest.approx(factor * len(samples), rel=0.05)
    assert loudest_hz(slower[RATE // 10 : -RATE // 10]) == pytest.approx(440, rel=0.02)
