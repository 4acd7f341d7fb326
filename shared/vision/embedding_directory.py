"""Embeddings as files that several machines share: `<folder>/<mm_hash>/encoder_cache.safetensors`.

The layout is that of vLLM's example connector, one tensor named `ec_cache`, so either can read what
the other has written. A file that has been read gets a mark beside it: when room is needed, those
go first.
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
    """All functions block. Names are SHA-256 hashes in hexadecimal digits."""

    def __init__(self, folder: Path, role: Role, max_bytes: int, ttl_s: float) -> None:
        """Raises ConfigError for a folder that cannot be used in this role."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        try:
            # Whoever comes first makes it.
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
        """Raises Overloaded when there is no room: what is there has not been read, nor expired."""
        place = self._place(name)
        if self._is_fresh(place):
            return
        self._make_room(embedding.nbytes)
        # A reader sees all of it or nothing, and so does whoever writes the same at the same time.
        fresh = self._folder / f".{name}.{secrets.token_hex(8)}"
        try:
            fresh.mkdir()
            save_file({TENSOR: embedding.contiguous().cpu()}, fresh / FILE)
            self.remove(name)
            os.rename(fresh, place)
        except (OSError, SafetensorError) as error:  # which hides an OSError while it writes
            if not self._is_fresh(place):
                raise Overloaded("the directory of embeddings takes no more") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def get(self, name: str) -> Tensor | None:
        """The embeddings; None if there are none, or the file is damaged."""
        place = self._place(name)
        try:
            if not self._is_fresh(place):
                return None
            # Not mapped: another machine may remove the file while somebody looks at the tensor,
            # and a page that is gone from a network's file system kills its reader (SIGBUS).
            return load((place / FILE).read_bytes())[TENSOR]
        except OSError:
            return None
        except (SafetensorError, KeyError):
            self.remove(name)
            return None

    def acknowledge(self, name: str) -> None:
        """They have been read: they may go when there is need for room."""
        with contextlib.suppress(OSError):
            (self._place(name) / ACKNOWLEDGED).touch()

    def remove(self, name: str) -> None:
        shutil.rmtree(self._place(name), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what has expired, and what a writer that died has left half done."""
        now_s = time.time()
        for place, written_s, _ in self._entries():
            if now_s - written_s > self._ttl_s:
                shutil.rmtree(place, ignore_errors=True)
        for left in self._folder.glob(".*"):
            with contextlib.suppress(OSError):
                if now_s - left.stat().st_mtime > self._ttl_s:
                    shutil.rmtree(left, ignore_errors=True)

    def _is_fresh(self, place: Path) -> bool:
        """Whether there is a file that has not expired."""
        with contextlib.suppress(OSError):
            return time.time() - (place / FILE).stat().st_mtime <= self._ttl_s
        return False

    def _make_room(self, num_bytes: int) -> None:
        self.sweep()
        entries = self._entries()
        room = self._max_bytes - sum(size for _, _, size in entries)
        read = [entry for entry in entries if (entry[0] / ACKNOWLEDGED).exists()]
        for place, _, size in sorted(read, key=lambda entry: entry[1]):
            if room >= num_bytes:
                break
            shutil.rmtree(place, ignore_errors=True)
            room += size
        if room < num_bytes:
            raise Overloaded("the directory of embeddings is full")

    def _entries(self) -> list[tuple[Path, float, int]]:
        """Place, time of writing and size of all that are there."""
        found = []
        for place in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if is_hash(place.name):
                    stat = (place / FILE).stat()
                    found.append((place, stat.st_mtime, stat.st_size))
        return found

    def _place(self, name: str) -> Path:
        assert is_hash(name), "names become paths"
        return self._folder / name
