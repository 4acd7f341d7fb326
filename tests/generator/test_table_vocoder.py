"""The table vocoder: any cut gives the same bits, and the table's pitch, voicing and level."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.protocol.chunks import ChunkSpec
from tests.generator import voices
from tests.generator.core.test_schedule import windows
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Codes, Samples, Vocoder, cut
from workers.generator.loader import load_vocoder
from workers.generator.table_vocoder import TableVocoder, VoiceTable

SPECS = st.builds(
    ChunkSpec,
    first=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    size=st.integers(1, 12),
    left=st.integers(2, 5),
    right=st.integers(2, 5),
)
RATE, FRAME = 24_000, voices.SAMPLES_PER_FRAME


@pytest.fixture(scope="module")
def vocoder(tmp_path_factory: pytest.TempPathFactory) -> Vocoder:
    folder = tmp_path_factory.mktemp("voice")
    voices.write(folder)
    return load_vocoder(folder, ChunkSpec(), "a.stage")


def in_chunks(vocoder: Vocoder, codes: Codes, spec: ChunkSpec) -> Samples:
    parts = [
        vocoder.synthesize([cut(vocoder, codes, window)])[0] for window in windows(spec, len(codes))
    ]
    return np.concatenate(parts)


@given(spec=SPECS, num_frames=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_any_cut_gives_the_samples_of_the_whole(
    vocoder: Vocoder, spec: ChunkSpec, num_frames: int, seed: int
) -> None:
    codes = voices.codes_of(seed, num_frames)
    expected = voices.whole(vocoder, codes)
    assert expected.shape == (num_frames * FRAME,)
    assert expected.dtype == np.int16
    np.testing.assert_array_equal(in_chunks(vocoder, codes, spec), expected)


@given(num_frames=st.integers(8, 40), num_more=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_frames_beyond_the_context_change_nothing(
    vocoder: Vocoder, num_frames: int, num_more: int, seed: int
) -> None:
    codes = voices.codes_of(seed, num_frames + num_more)
    num_final = (num_frames - vocoder.min_left) * FRAME
    short, long = voices.whole(vocoder, codes[:num_frames]), voices.whole(vocoder, codes)
    np.testing.assert_array_equal(short[:num_final], long[:num_final])
    # With one frame less of context they would differ, or the check would prove nothing.
    assert not np.array_equal(short[num_final:], long[num_final : len(short)])


@pytest.mark.parametrize("shape", [(0, 7, 2), (2, 5, 2), (2, 4, 0), (1, 3, 1)])
def test_chunks_of_several_requests_do_not_change_one_another(
    vocoder: Vocoder, shape: tuple[int, int, int]
) -> None:
    left, size, right = shape
    chunks = []
    for seed in range(4):
        start = left if left < vocoder.min_left else 9 + seed
        end = start + size
        codes = voices.codes_of(seed, end + right)
        chunks.append(cut(vocoder, codes, Window(start - left, start, end, end + right)))
    together = vocoder.synthesize(chunks)
    for chunk, samples in zip(chunks, together, strict=True):
        np.testing.assert_array_equal(samples, vocoder.synthesize([chunk])[0])


def voice(envelope: float, pitch_hz: float, voicing: float) -> TableVocoder:
    """A vocoder with one code."""
    bands = np.array([60.0, 11_000.0])
    levels = np.full((1, 2), envelope)
    table = VoiceTable(RATE, FRAME, bands, levels, np.array([pitch_hz]), np.array([voicing]))
    return TableVocoder(table)


def spoken(vocoder: TableVocoder, num_frames: int = 100) -> NDArray[np.float64]:
    """One second and more of the only code, without the ends."""
    samples = voices.whole(vocoder, np.zeros((num_frames, 1), np.int32))
    return samples[5 * FRAME : -5 * FRAME] / 32768


@pytest.mark.parametrize(("pitch_hz", "voicing"), [(0.0, 0.0), (125.0, 1.0), (125.0, 0.6)])
def test_the_power_is_that_of_the_envelope(pitch_hz: float, voicing: float) -> None:
    level = np.sqrt(np.mean(spoken(voice(-3.0, pitch_hz, voicing)) ** 2))
    assert level == pytest.approx(np.exp(-3.0), rel=0.1)


@pytest.mark.parametrize("pitch_hz", [80.0, 125.0, 310.0])
def test_pulses_have_the_pitch_of_the_table(pitch_hz: float) -> None:
    sound = spoken(voice(-3.0, pitch_hz, 1.0))
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    low = np.fft.rfftfreq(len(sound), 1 / RATE) < 1.5 * pitch_hz
    assert np.argmax(spectrum[low]) * RATE / len(sound) == pytest.approx(pitch_hz, abs=1.0)


def test_a_code_without_a_pitch_is_noise() -> None:
    sound = spoken(voice(-3.0, 0.0, 1.0))
    spectrum = np.abs(np.fft.rfft(sound)) ** 2
    assert spectrum.max() < 30 * spectrum.mean()


def test_a_level_over_full_scale_is_clipped() -> None:
    samples = voices.whole(voice(3.0, 125.0, 1.0), np.zeros((20, 1), np.int32))
    assert (samples.min(), samples.max()) == (-32768, 32767)
