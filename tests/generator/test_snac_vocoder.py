"""The vocoder of SNAC: samples are those of its own package for the whole speech."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from tests import orpheus
from workers.generator.core.schedule import window_at
from workers.generator.core.vocoder import Chunk, Speaker, Vocoder
from workers.generator.loader import load_vocoder

NUM_FRAMES = 31
SPEC = ChunkSpec(first=(3, 9), size=8, left=3, right=3)
FRAMES = np.random.default_rng(0).integers(0, 4096, (NUM_FRAMES, 7)).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snac")
    orpheus.write_snac(folder)
    return folder


def speak(vocoder: Vocoder, frames: Any, seed: int) -> Any:
    """Return the samples of a speech, chunk by chunk."""
    parts, start = [], 0
    while window := window_at(SPEC, start, len(frames), is_complete=True):
        before, _, after = window.shape
        codes = frames[window.first : window.last]
        chunk = Chunk(codes, window.first, before, after, speaker=Speaker("tara", seed))
        parts += vocoder.synthesize([chunk])
        start = window.end
    return np.concatenate(parts)


@pytest.mark.parametrize("seed", [0, 7])
def test_chunks_are_parts_of_the_whole_speech(folder: Path, seed: int) -> None:
    vocoder = load_vocoder(folder, SPEC, "the stage", dtype="float64")
    codec = orpheus.load_snac(folder)
    whole = orpheus.decode(codec, FRAMES.tolist(), seed)
    expected = np.rint(whole * 32767).astype(np.int16)
    assert np.array_equal(speak(vocoder, FRAMES, seed), expected)
    assert vocoder.sample_rate == 24_000
    assert len(expected) == NUM_FRAMES * vocoder.samples_per_frame
    others = orpheus.decode(codec, FRAMES.tolist(), seed + 1)
    assert np.abs(others - whole).max() > 0.01, "the noise depends on the seed"
    louder = np.abs(whole).max()
    assert 0.05 < louder < 1, "the sound is neither silent nor clipped"


def test_a_chunk_in_a_batch_is_the_chunk_alone(folder: Path) -> None:
    vocoder = load_vocoder(folder, SPEC, "the stage", dtype="float32")
    chunks = [Chunk(FRAMES[n : n + 10], n, 3, 3, speaker=Speaker(None, n)) for n in range(4)]
    alone = [vocoder.synthesize([chunk])[0] for chunk in chunks]
    for one, batched in zip(alone, vocoder.synthesize(chunks), strict=True):
        assert np.array_equal(one, batched)


def test_weights_may_be_safetensors(folder: Path, tmp_path: Path) -> None:
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    first, second = (load_vocoder(each, SPEC, "s", dtype="float64") for each in (folder, tmp_path))
    assert np.array_equal(speak(first, FRAMES, 1), speak(second, FRAMES, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vq_strides": [8, 4, 2, 1]}, "vq_strides"),
        ({"attn_window_size": 32}, "attn_window_size"),
        ({"decoder_dim": 32}, "cannot be served"),
        ({"unknown": 1}, "cannot be served"),
    ],
)
def test_other_codecs_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(orpheus.SNAC_CONFIG | changes))
    (tmp_path / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes())
    with pytest.raises(ConfigError, match=message) as refused:
        load_vocoder(tmp_path, SPEC, "the stage")
    assert refused.value.field == "the stage.path"


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(orpheus.SNAC_CONFIG))
    with pytest.raises(ConfigError, match="neither model"):
        load_vocoder(tmp_path, SPEC, "the stage")
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ConfigError):
        load_vocoder(tmp_path, SPEC, "the stage")
    assert not marker.exists()


def test_the_error_without_the_package_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "snac", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagemill\[snac\]'") as refused:
        load_vocoder(folder, SPEC, "the stage")
    assert refused.value.field == "the stage.path"


def test_chunks_need_the_reach_of_the_network_as_context(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 is less than 3") as refused:
        load_vocoder(folder, ChunkSpec(left=2, right=3), "the stage")
    assert refused.value.field == "the stage.chunks.left"


def test_the_reference_notices_another_order_of_codes(folder: Path) -> None:
    codec = orpheus.load_snac(folder)
    swapped = FRAMES[:, [0, 4, 2, 3, 1, 5, 6]]
    first, second = (orpheus.decode(codec, each.tolist(), 0) for each in (FRAMES, swapped))
    assert np.abs(first - second).max() > 0.01
