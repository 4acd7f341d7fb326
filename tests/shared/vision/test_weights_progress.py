"""Bytes of weights that a process has read, as the kernel counts them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shared.vision import weights_progress
from shared.vision.weights_progress import WeightsProgress

NUM_TENSORS = 8
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        tensors = {f"t{index}": torch.ones(MIB) for index in range(NUM_TENSORS)}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def test_only_what_was_used_counts_as_read(folder: Path) -> None:
    progress = WeightsProgress(folder)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert progress.measure() == (0, total)
    with safe_open(folder / "model-0.safetensors", "pt") as opened:
        tensors = [opened.get_tensor(f"t{index}") for index in range(NUM_TENSORS)]
        before, _ = progress.measure() or (0, 0)
        assert before < total / 4, "a tensor that nobody has used counts as read"
        tensors[0].sum()
        num_bytes, _ = progress.measure() or (0, 0)
        assert num_bytes >= 4 * MIB
        for tensor in tensors:
            tensor.sum()
        half, _ = progress.measure() or (0, 0)
        assert half >= NUM_TENSORS * 4 * MIB
        assert half <= total / 2
        del tensors, tensor
    assert progress.measure() == (half, total), "a file that was copied and unmapped is forgotten"


def test_without_the_kernels_figures_there_is_no_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_progress, "SMAPS", folder / "nowhere")
    assert WeightsProgress(folder).measure() is None


def test_a_link_into_a_cache_counts_as_its_file(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "model.safetensors").symlink_to(folder / "model-0.safetensors")
    (links / "gone.safetensors").symlink_to(folder / "nowhere")
    progress = WeightsProgress(links)
    with safe_open(links / "model.safetensors", "pt") as opened:
        opened.get_tensor("t0").sum()
        done, total = progress.measure() or (0, 0)
    assert done >= 4 * MIB
    assert total == (folder / "model-0.safetensors").stat().st_size
