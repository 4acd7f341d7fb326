"""The vocoders of omni models against transformers, in float64: whole, in chunks, in batches."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from tests import omni
from workers.generator.core.schedule import window_at
from workers.generator.core.vocoder import Chunk, Codes, Samples, Speaker, cut
from workers.generator.loader import load_vocoder
from workers.generator.neural_vocoder import NeuralVocoder
from workers.generator.token2wav import VOICES_FILE, Qwen25OmniVocoder

pytestmark = pytest.mark.usefixtures("one_thread")

KEY = "models.omni.stages.code2wav"
WHOLE = ChunkSpec(size=1000, left=1000, right=1000)
SPEAKER = Speaker("Ethan", 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("omni")
    omni.write_qwen3(folder / "3")
    omni.write_qwen25(folder / "2.5")
    return {"3": folder / "3", "2.5": folder / "2.5"}


@pytest.fixture(scope="module")
def vocoders(folders: dict[str, Path]) -> dict[str, NeuralVocoder]:
    return {name: load(folder) for name, folder in folders.items()}


def load(folder: Path, spec: ChunkSpec = WHOLE) -> NeuralVocoder:
    vocoder = load_vocoder(folder, spec, KEY, voices=omni.VOICES, dtype="float64")
    assert isinstance(vocoder, NeuralVocoder)
    return vocoder


def codes_of(vocoder: NeuralVocoder, seed: int, num_frames: int) -> Codes:
    shape = (num_frames, vocoder.num_codebooks)
    return np.random.default_rng(seed).integers(0, omni.NUM_CODES, shape).astype(np.int32)


def spoken(
    vocoder: NeuralVocoder, codes: Codes, spec: ChunkSpec, speaker: Speaker = SPEAKER
) -> list[Samples]:
    """The samples of each chunk, in their order."""
    parts: list[Samples] = []
    start = 0
    while (window := window_at(spec, start, len(codes), is_complete=True)) is not None:
        parts += vocoder.synthesize([cut(vocoder, codes, window, speaker)])
        start = window.end
    return parts


@torch.no_grad()
def test_qwen3_speaks_like_transformers_whole_and_in_chunks(
    folders: dict[str, Path], vocoders: dict[str, NeuralVocoder]
) -> None:
    vocoder, reference = vocoders["3"], omni.reference_qwen3(folders["3"]).code2wav
    codes = codes_of(vocoder, 1, 120)
    batch = torch.from_numpy(codes.T.astype(np.int64))[None]
    expected = omni.pcm(reference.chunked_decode(batch, 300, 25))
    (whole,) = spoken(vocoder, codes, WHOLE)
    np.testing.assert_array_equal(whole, expected)
    assert len(expected) == 120 * vocoder.samples_per_frame - vocoder.num_missing
    assert vocoder.num_missing > 0
    spec = ChunkSpec(first=(3, 9), size=25, left=40, right=1)
    np.testing.assert_array_equal(np.concatenate(spoken(vocoder, codes, spec)), expected)
    # The reference's own chunks lack samples at their ends, and are the same else.
    pieces = spoken(vocoder, codes, ChunkSpec(size=50, left=25, right=1))
    short = [piece[: len(piece) - vocoder.num_missing] for piece in pieces[:-1]]
    theirs = omni.pcm(reference.chunked_decode(batch, 50, 25))
    np.testing.assert_array_equal(np.concatenate([*short, pieces[-1]]), theirs)


@torch.no_grad()
def test_qwen25_speaks_like_transformers_with_the_noise_of_the_seed(
    folders: dict[str, Path],
    vocoders: dict[str, NeuralVocoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocoder, reference = vocoders["2.5"], omni.reference_token2wav(folders["2.5"])
    assert isinstance(vocoder, Qwen25OmniVocoder)
    codes = codes_of(vocoder, 2, 40)
    noise = torch.from_numpy(vocoder.noise(SPEAKER.seed, 0, 80))[None]
    monkeypatch.setattr(torch, "randn", lambda shape, **_: noise.reshape(shape))
    stored = load_file(folders["2.5"] / VOICES_FILE)
    expected = reference(
        torch.from_numpy(codes[None, :, 0].astype(np.int64)),
        conditioning=stored["Ethan.cond"].double(),
        reference_mel=stored["Ethan.ref_mel"].double(),
    )
    (whole,) = spoken(vocoder, codes, WHOLE)
    np.testing.assert_array_equal(whole, omni.pcm(expected))
    assert len(whole) == 40 * vocoder.samples_per_frame
    pieces = spoken(vocoder, codes, ChunkSpec(first=(3,), size=15, left=1000, right=1000))
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    for other in (Speaker("Ethan", 8), Speaker("Chelsie", 7)):
        assert not np.array_equal(spoken(vocoder, codes, WHOLE, other)[0], whole)


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_a_chunk_in_a_batch_has_the_samples_that_it_has_alone(
    vocoders: dict[str, NeuralVocoder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocoder = vocoders[name]
    chunks = [
        Chunk(codes_of(vocoder, seed, 20), 5 * seed, 6, 4, 0, Speaker("Ethan", seed))
        for seed in range(4)
    ]
    alone = vocoder.synthesize(chunks)
    sizes = []
    decode = vocoder.decode

    def counted(codes: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        sizes.append(len(chunks))
        return decode(codes, chunks)

    monkeypatch.setattr(vocoder, "decode", counted)
    monkeypatch.setattr(vocoder, "max_rows", 3)
    for samples, other in zip(alone, vocoder.synthesize(chunks), strict=True):
        assert len(samples) == 10 * vocoder.samples_per_frame
        np.testing.assert_array_equal(samples, other)
    assert sizes == [3, 1]


def test_folders_that_lack_something_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="left: 24 is less than 25"):
        load(folders["3"], ChunkSpec(left=24))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folders["2.5"] / name)
    with pytest.raises(ConfigError, match=f"{VOICES_FILE}: not a safetensors file"):
        load(tmp_path)
    save_file({"Ethan.cond": torch.zeros(1)}, tmp_path / VOICES_FILE)
    with pytest.raises(ConfigError, match=r"there is no array 'Ethan\.ref_mel'"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"stages\.code2wav\.path"):
        load(tmp_path)
