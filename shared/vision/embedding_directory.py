"""Embedding directory: files that machines share, `<folder>/<mm_hash>/encoder_cache.safetensors`.

The layout is the same as in vLLM's example connector, with one tensor named `ec_cache`, so each
system can read the files of the other. A file that has been read is marked by a second file. Only
marked and expired files are removed when room is needed.
"""

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from shared.errors import ConfigError, Overloaded
from shared.protocol.multimodal import is_hash

Role = Literal["producer", "consumer", "both"]

FILE = "encoder_cache.safetensors"
TENSOR = "ec_cache"
ACKNOWLEDGED = "acknowledged"


class EmbeddingDirectory:
    """Embeddings by name, a SHA-256 hash in hexadecimal digits. All methods block."""

    def __init__(self, folder: Path, role: Role, max_bytes: int, ttl_s: float) -> None:
        """Raises ConfigError for a folder that cannot be used in this role."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        try:
            # The first worker creates the folder.
            folder.mkdir(parents=True, exist_ok=True)
            if role != "consumer":
                probe = folder / f".{secrets.token_hex(8)}"
                probe.touch()
                probe.unlink()
            os.listdir(folder)
        except OSError as error:
            needed = "read" if role == "consumer" else "written"
            raise ConfigError(
                f"embeddings.path: {folder} cannot be {needed}: {error.strerror}",
                field="embeddings.path",
            ) from error

    def put(self, name: str, embedding: Tensor) -> None:
        """Write a file. Raises Overloaded if too few other files have been read or have expired."""
        folder = self._folder_of(name)
        if self._is_fresh(folder):
            return
        self._make_room(embedding.nbytes)
        # Readers and other writers of the same name find either the complete file or no file.
        draft = self._folder / f".{name}.{secrets.token_hex(8)}"
        try:
            draft.mkdir()
            save_file({TENSOR: embedding.contiguous().cpu()}, draft / FILE)
            self.remove(name)
            os.rename(draft, folder)
        except (OSError, SafetensorError) as error:  # safetensors hides an OSError when it writes
            if not self._is_fresh(folder):
                raise Overloaded("the directory of embeddings cannot be written") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def get(self, name: str) -> Tensor | None:
        """Return the embeddings; None if they are not stored, or the file is damaged."""
        folder = self._folder_of(name)
        try:
            if not self._is_fresh(folder):
                return None
            # The file is not mapped, because another machine may remove it while the tensor is in
            # use, and a missing page of a network file system kills its reader (SIGBUS).
            return load((folder / FILE).read_bytes())[TENSOR]
        except OSError:
            return None
        except (SafetensorError, KeyError):
            self.remove(name)
            return None

    def acknowledge(self, name: str) -> None:
        """Mark the file as read, so that it may be removed when room is needed."""
        with contextlib.suppress(OSError):
            (self._folder_of(name) / ACKNOWLEDGED).touch()

    def remove(self, name: str) -> None:
        shutil.rmtree(self._folder_of(name), ignore_errors=True)

    def sweep(self) -> None:
        """Remove expired files, and drafts of writers that have died."""
        now_s = time.time()
        for folder, written_s, _ in self._entries():
            if now_s - written_s > self._ttl_s:
                shutil.rmtree(folder, ignore_errors=True)
        for draft in self._folder.glob(".*"):
            with contextlib.suppress(OSError):
                if now_s - draft.stat().st_mtime > self._ttl_s:
                    shutil.rmtree(draft, ignore_errors=True)

    def _is_fresh(self, folder: Path) -> bool:
        """Return whether there is a file that has not expired."""
        with contextlib.suppress(OSError):
            return time.time() - (folder / FILE).stat().st_mtime <= self._ttl_s
        return False

    def _make_room(self, num_bytes: int) -> None:
        self.sweep()
        entries = self._entries()
        room = self._max_bytes - sum(size for _, _, size in entries)
        read = [entry for entry in entries if (entry[0] / ACKNOWLEDGED).exists()]
        for folder, _, size in sorted(read, key=lambda entry: entry[1]):
            if room >= num_bytes:
                break
            shutil.rmtree(folder, ignore_errors=True)
            room += size
        if room < num_bytes:
            raise Overloaded("the directory of embeddings is full")

    def _entries(self) -> list[tuple[Path, float, int]]:
        """Return folder, time of writing and size of every file."""
        entries = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if is_hash(folder.name):
                    stat = (folder / FILE).stat()
                    entries.append((folder, stat.st_mtime, stat.st_size))
        return entries

    def _folder_of(self, name: str) -> Path:
        assert is_hash(name), "names become paths"
        return self._folder / name
