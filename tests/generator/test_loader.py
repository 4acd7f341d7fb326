"""Loading of a voice: every refusal names the stage's key, the file, and what is wrong in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from tests.generator import voices
from workers.generator.loader import TABLE_FILE, load_vocoder

KEY = "models.demo.stages.code2wav"
HALF = np.float16
DEFAULT = ChunkSpec()


def refusal(folder: Path, spec: ChunkSpec = DEFAULT) -> str:
    with pytest.raises(ConfigError) as refused:
        load_vocoder(folder, spec, KEY)
    assert refused.value.field is not None
    assert refused.value.message.startswith(f"{refused.value.field}: ")
    assert refused.value.field.startswith(f"{KEY}.")
    assert str(folder / TABLE_FILE) in refused.value.message
    return refused.value.message


def test_a_voice_is_loaded(tmp_path: Path) -> None:
    voices.write(tmp_path)
    vocoder = load_vocoder(tmp_path, ChunkSpec(), KEY)
    assert vocoder.sample_rate == 24_000
    assert vocoder.samples_per_frame == voices.SAMPLES_PER_FRAME
    assert vocoder.num_codes == voices.NUM_CODES


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path)


@pytest.mark.parametrize("data", [b"", b"RIFF" + bytes(60), b"\x80\x04\x95" * 40])
def test_foreign_bytes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / TABLE_FILE).write_bytes(data)
    assert "not a safetensors file" in refusal(tmp_path)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = voices.write(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["envelope", "pitch", "voicing", "band_hz"])
def test_an_array_that_is_not_there(tmp_path: Path, name: str) -> None:
    voices.write(tmp_path, {name: None})
    assert f"{name}: there is no such array" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("pitch", np.zeros((40, 1), HALF), "expected float16 [any], got float16 [40, 1]"),
        ("pitch", np.zeros(0, HALF), "expected float16 [any], got float16 [0]"),
        ("pitch", np.zeros(40, np.float32), "expected float16 [any], got float32 [40]"),
        ("pitch", np.full(40, 3, HALF), "all values must be 0, or from 20 to 12000"),
        ("pitch", np.full(40, 20_000, HALF), "all values must be 0, or from 20 to 12000"),
        ("pitch", np.full(40, np.nan, HALF), "all values must be finite"),
        ("voicing", np.zeros(39, HALF), "expected float16 [40], got float16 [39]"),
        ("voicing", np.full(40, 1.5, HALF), "all values must be from 0 to 1"),
        ("envelope", np.zeros((40, 11), HALF), "expected float16 [40, 12], got float16 [40, 11]"),
        ("envelope", np.full((40, 12), np.inf, HALF), "all values must be finite"),
        ("band_hz", np.full(12, 60, np.float32), "the bands must be in ascending order"),
    ],
)
def test_arrays_that_are_no_table(
    tmp_path: Path, name: str, array: np.ndarray[Any, Any], message: str
) -> None:
    voices.write(tmp_path, {name: array})
    assert f"{name}: {message}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format", "other", "expected 'pagemill.code2wav.1', got 'other'"),
        ("sample_rate", "fast", "expected a whole number above 0, got 'fast'"),
        ("sample_rate", "-24000", "expected a whole number above 0, got '-24000'"),
        ("sample_rate", "999999999", "999999999 is over the limit of 192000"),
        ("frame_rate", "0", "expected a whole number above 0, got '0'"),
        ("frame_rate", "50.5", "expected a whole number above 0, got '50.5'"),
        ("frame_rate", "49", "a frame must have a multiple of 20 samples, at 24000 Hz"),
    ],
)
def test_metadata_of_another_format(tmp_path: Path, name: str, value: str, message: str) -> None:
    voices.write(tmp_path, metadata=voices.METADATA | {name: value})
    assert f"{name}: {message}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ChunkSpec(left=1), f"{KEY}.chunks.left: 1 is less than 2"),
        (ChunkSpec(right=0), f"{KEY}.chunks.right: 0 is less than 2"),
        (ChunkSpec(size=751), f"{KEY}.chunks.size: 751 frames do not fit into a record"),
        (ChunkSpec(first=(5, 751)), f"{KEY}.chunks.first: 751 frames do not fit into a record"),
    ],
)
def test_chunks_that_do_not_suit_the_voice(tmp_path: Path, spec: ChunkSpec, message: str) -> None:
    voices.write(tmp_path)
    assert refusal(tmp_path, spec).startswith(message)
