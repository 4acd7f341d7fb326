"""Long recordings are cut where they are quietest."""

from collections.abc import Iterator

import numpy as np
import pytest

from shared.models.mel_layout import SAMPLE_RATE
from workers.renderer.media.splitter import MAX_PIECE_S, Samples, split_sound


def noise(seconds: float) -> Samples:
    rng = np.random.default_rng(1)
    return np.asarray(rng.uniform(-0.5, 0.5, int(seconds * SAMPLE_RATE)), np.float32)


def in_parts(samples: Samples, length: int) -> Iterator[Samples]:
    return (samples[at : at + length] for at in range(0, len(samples), length))


@pytest.mark.parametrize("seconds", [0.5, 28.0])
def test_a_short_recording_is_one_piece(seconds: float) -> None:
    sound = noise(seconds)
    (piece,) = split_sound(in_parts(sound, 5000))
    assert np.array_equal(piece, sound)


@pytest.mark.parametrize("part_len", [1000, SAMPLE_RATE, 2**20])
def test_a_cut_is_in_the_middle_of_the_pause(part_len: int) -> None:
    sound = noise(70.0)
    for pause_s in (26.7, 53.5):
        sound[int(pause_s * SAMPLE_RATE) :][: SAMPLE_RATE // 10] *= 0.01
    pieces = list(split_sound(in_parts(sound, part_len)))
    assert np.array_equal(np.concatenate(pieces), sound)
    assert [round(len(piece) / SAMPLE_RATE, 3) for piece in pieces] == [26.75, 26.8, 16.45]


def test_no_piece_is_too_long_or_too_short_for_the_model() -> None:
    for seconds in (28.001, 28.06, 56.1, 300.0):
        for window_s in (MAX_PIECE_S, 4.0):
            pieces = [len(piece) for piece in split_sound(in_parts(noise(seconds), 7001), window_s)]
            assert max(pieces) <= window_s * SAMPLE_RATE
            assert min(pieces) >= 321
