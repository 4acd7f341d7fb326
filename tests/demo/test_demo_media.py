"""The demo judges and draws what it has been told; its sound is made by hand here."""

import numpy as np

from ops.demo_media import Speech

RATE = 24_000


def tone(length_s: float, amplitude: float) -> Speech:
    times = np.arange(int(length_s * RATE)) / RATE
    samples = np.round(amplitude * np.sin(2 * np.pi * 200 * times)).astype(np.int16)
    return Speech("three red circles", samples, RATE)


def test_sound_as_long_and_as_loud_as_speech_is_right() -> None:
    assert tone(1.5, 3000).find_fault() is None


def test_silence_noise_at_full_scale_and_a_cut_are_wrong() -> None:
    assert "loudness is -90 dB" in (tone(1.5, 0).find_fault() or "")
    assert "loudness is -3 dB" in (tone(1.5, 32_767).find_fault() or "")
    assert "lasts 0.3 s" in (tone(0.3, 3000).find_fault() or "")
    assert "lasts 0.0 s" in (tone(0.0, 3000).find_fault() or "")


def test_a_waveform_is_a_line_where_it_is_silent_and_as_high_as_the_loudest_part() -> None:
    loud, silent = tone(1.0, 3000).samples, np.zeros(RATE, np.int16)
    drawn = Speech("", np.concatenate([loud, silent]), RATE).draw(columns=8, rows=3).split("\n")
    assert drawn == ["⣿⣿⣿⣿⠀⠀⠀⠀", "⣿⣿⣿⣿⠶⠶⠶⠶", "⣿⣿⣿⣿⠀⠀⠀⠀"]
