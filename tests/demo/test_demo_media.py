"""The demo model describes and draws images as requested. Its sound is built by hand here."""

import io

import numpy as np
from PIL import Image, ImageDraw

from ops.demo_media import Painting, Speech

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


RED, BLUE = (230, 20, 30), (30, 40, 220)


def painting(shape: tuple[int, int, int], background: tuple[int, int, int]) -> Painting:
    image = Image.new("RGB", (120, 120), background)
    ImageDraw.Draw(image).ellipse((30, 30, 90, 90), fill=shape)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Painting(file.getvalue(), (255, 0, 0), (0, 0, 255))


def test_an_image_of_the_right_colours_is_right() -> None:
    assert painting(RED, BLUE).find_fault() is None


def test_images_of_other_colours_or_without_a_shape_are_wrong() -> None:
    assert "0 % of it have the colour of the shape" in (painting(BLUE, BLUE).find_fault() or "")
    assert "of the shape" in (painting(BLUE, RED).find_fault() or "")
    assert "of the background" in (painting(RED, (250, 250, 250)).find_fault() or "")


def test_a_small_image_has_two_pixels_in_a_character() -> None:
    lines = painting(RED, BLUE).draw(rows=4).plain.split("\n")
    assert lines == ["▀" * 8] * 4 + [""]
