"""Samples of sounds: one channel at the wanted rate, by librosa's arithmetic."""

import math
import struct

import numpy as np
import pytest
import soxr

from tests.renderer.decoding import files
from tests.renderer.decoding.reading import Reader

RATE = 16_000


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("num_samples", [1, 1_001, 100_003])
def test_samples_are_the_resampled_mean_of_the_channels(
    reader: Reader, rate: int, num_samples: int
) -> None:
    samples = files.noise(num_samples)
    probe, read = reader.audio(files.sound(samples, rate))
    assert (probe.rate, probe.num_channels, probe.num_samples) == (rate, 2, num_samples)
    expected = samples.mean(axis=1)
    if rate != RATE:
        expected = soxr.resample(expected, rate, RATE, quality="HQ")
    length = math.ceil(num_samples * RATE / rate)
    assert len(read) == length
    np.testing.assert_array_equal(read, np.pad(expected, (0, length - len(expected))))


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_U8", 1e-2),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.3),
        ("OGG", "OPUS", 0.3),
        ("MP3", "MPEG_LAYER_III", 0.3),
    ],
)
def test_formats_of_the_base_installation(
    reader: Reader, kind: str, subtype: str, tolerance: float
) -> None:
    time = np.arange(2 * RATE) / RATE
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)[:, None]
    _, read = reader.audio(files.sound(tone, RATE, format=kind, subtype=subtype))
    assert abs(len(read) - len(tone)) <= 1200
    middle = slice(RATE // 2, RATE)
    assert 1 - np.corrcoef(read[middle], tone[middle, 0])[0, 1] < tolerance


def test_flac_without_a_length_is_counted(reader: Reader) -> None:
    samples = files.noise(40_000)
    data = files.sound(samples, RATE, format="FLAC", subtype="PCM_16")
    _, expected = reader.audio(data)
    probe, read = reader.audio(files.without_length(data))
    assert probe.num_samples == len(read) == 40_000
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("file_len", "data_len"), [(0, 0), (36, 0), (2**32 - 1, 0), (2**32 - 1, 2**32 - 1)]
)
def test_wav_without_a_length_is_read_to_its_end(
    reader: Reader, file_len: int, data_len: int
) -> None:
    data = files.sound(files.noise(40_000), RATE, format="WAV", subtype="PCM_16")
    _, expected = reader.audio(data)
    head = data[:4] + struct.pack("<I", file_len) + data[8:40] + struct.pack("<I", data_len)
    probe, read = reader.audio(head + data[44:])
    assert probe.num_samples == len(read) == 40_000
    np.testing.assert_array_equal(read, expected)


def test_a_sound_that_libsndfile_cannot_read_is_read_by_pyav(reader: Reader) -> None:
    pytest.importorskip("av", reason="needs PyAV")
    tone = files.noise(RATE)
    data = files.packed_sound("aac", "adts", tone, RATE)
    _, expected = reader.audio(data)
    _, read = reader.audio(b"ID3\4\0\0\0\0\0\0" + data)
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("codec", "container", "rate"),
    [
        ("aac", "mp4", 44_100),
        ("aac", "adts", 44_100),
        ("libopus", "webm", 48_000),
        ("pcm_s16le", "avi", 16_000),
    ],
)
def test_sounds_of_containers(reader: Reader, codec: str, container: str, rate: int) -> None:
    pytest.importorskip("av", reason="needs PyAV")
    time = np.arange(2 * rate) / rate
    tone = (np.stack([np.sin(2 * np.pi * 440 * time)] * 2, axis=-1) / 2).astype(np.float32)
    probe, read = reader.audio(files.packed_sound(codec, container, tone, rate))
    assert (probe.rate, probe.num_channels) == (rate, 2)
    assert len(read) == pytest.approx(2 * RATE, abs=RATE / 8)
    assert np.abs(read[RATE // 2 : RATE]).max() == pytest.approx(0.5, abs=0.05)
    spectrum = np.abs(np.fft.rfft(read[RATE // 2 : RATE // 2 + RATE]))
    assert np.argmax(spectrum) == 440
