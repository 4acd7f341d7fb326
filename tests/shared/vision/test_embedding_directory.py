"""Embeddings as files: the layout that others read, limits, and what happens at them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shared.errors import ConfigError, Overloaded
from shared.vision import embedding_directory
from shared.vision.embedding_directory import FILE, TENSOR, EmbeddingDirectory

KIB = 1024
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def embedding(seed: int = 0) -> torch.Tensor:
    """One KiB."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))


def opened(folder: Path, max_bytes: int = 64 * KIB, ttl_s: float = 60) -> EmbeddingDirectory:
    return EmbeddingDirectory(folder, "both", max_bytes, ttl_s)


def age(folder: Path, name: str, by_s: float) -> None:
    then = time.time() - by_s
    os.utime(folder / name / FILE, (then, then))


def test_the_layout_is_the_example_connectors(tmp_path: Path) -> None:
    opened(tmp_path).put(A, embedding())
    with safe_open(tmp_path / A / "encoder_cache.safetensors", "pt") as file:
        assert list(file.keys()) == ["ec_cache"]
        assert torch.equal(file.get_tensor("ec_cache"), embedding())


def test_files_of_other_workers_are_read(tmp_path: Path) -> None:
    (tmp_path / A).mkdir()
    written = embedding().to(torch.bfloat16)
    save_file({TENSOR: written}, tmp_path / A / FILE)
    tensor = opened(tmp_path).get(A)
    assert tensor is not None
    assert torch.equal(tensor, written)
    assert opened(tmp_path).get(B) is None


def test_a_stored_file_is_not_written_again(tmp_path: Path) -> None:
    opened(tmp_path).put(A, embedding())
    before = (tmp_path / A / FILE).stat().st_mtime_ns
    opened(tmp_path).put(A, embedding(1))
    assert (tmp_path / A / FILE).stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == [A]


def test_read_files_make_room_for_unread_ones(tmp_path: Path) -> None:
    directory = opened(tmp_path, max_bytes=3 * KIB)
    directory.put(A, embedding())
    directory.put(B, embedding(1))
    with pytest.raises(Overloaded):
        directory.put(C, embedding(2))
    assert directory.get(C) is None
    directory.acknowledge(B)
    directory.put(C, embedding(2))
    assert directory.get(A) is not None
    assert directory.get(B) is None
    assert directory.get(C) is not None


def test_expired_entries_are_gone(tmp_path: Path) -> None:
    directory = opened(tmp_path, max_bytes=3 * KIB, ttl_s=60)
    directory.put(A, embedding())
    age(tmp_path, A, 61)
    assert directory.get(A) is None
    directory.put(B, embedding(1))
    directory.sweep()
    assert [entry.name for entry in tmp_path.iterdir()] == [B]


def test_expired_files_are_written_again(tmp_path: Path) -> None:
    directory = opened(tmp_path, ttl_s=60)
    directory.put(A, embedding())
    age(tmp_path, A, 61)
    directory.put(A, embedding(1))
    tensor = directory.get(A)
    assert tensor is not None
    assert torch.equal(tensor, embedding(1))


def test_an_embedding_does_not_depend_on_its_file_after_reading(tmp_path: Path) -> None:
    """A mapping would: pages of a file that another machine has removed may be lost."""
    directory = opened(tmp_path)
    directory.put(A, embedding())
    tensor = directory.get(A)
    assert tensor is not None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_disk_that_takes_no_more_is_no_fault_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(embedding_directory, "save_file", full)
    with pytest.raises(Overloaded):
        opened(tmp_path).put(A, embedding())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_a_miss_and_can_be_written_again(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.put(A, embedding())
    with (tmp_path / A / FILE).open("r+b") as file:
        file.truncate(100)
    assert directory.get(A) is None
    directory.put(A, embedding())
    assert directory.get(A) is not None


def test_the_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    script = """
import os, sys, signal, torch
from pathlib import Path
import shared.vision.embedding_directory as ec
ec.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
directory = ec.EmbeddingDirectory(Path(sys.argv[1]), "producer", 2**20, 60)
directory.put("a" * 64, torch.zeros(4, 64))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    directory = opened(tmp_path, ttl_s=60)
    assert directory.get(A) is None
    then = time.time() - 61
    os.utime(left, (then, then))
    directory.sweep()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for role in ("producer", "both"):
        with pytest.raises(ConfigError, match=r"embeddings\.path: .* cannot be written"):
            EmbeddingDirectory(file / "below", role, KIB, 60)
    with pytest.raises(ConfigError, match=r"embeddings\.path: .* cannot be written"):
        EmbeddingDirectory(Path("/proc/pagemill"), "producer", KIB, 60)
    with pytest.raises(ConfigError, match=r"embeddings\.path: .* cannot be read"):
        EmbeddingDirectory(file / "below", "consumer", KIB, 60)
