"""Storage of a backup: a folder, or one file in zip format.

An incomplete backup has a temporary name. Only the owner can read a backup, because it contains
prompts and answers.
"""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from shared.errors import InvalidRequest
from workers.cli.outputs import fault_of

SUFFIX = ".zip"
READ_BYTES = 2**20


class Archive(Protocol):
    """Interface to the parts of a backup, by name."""

    def write(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a part. Raises InvalidRequest if it is missing."""


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        with os.fdopen(
            os.open(self._path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def open(self, name: str) -> IO[bytes]:
        try:
            return (self._path / name).open("rb")
        except OSError as error:
            raise _missing(name) from error


class _Zip:
    """Archive in zip format. It stores snapshots as they are: the server has compressed them."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file

    def write(self, name: str) -> IO[bytes]:
        return self._file.open(name, "w", force_zip64=True)

    def open(self, name: str) -> IO[bytes]:
        try:
            return self._file.open(name)
        except (KeyError, zipfile.BadZipFile) as error:
            raise _missing(name) from error


@contextlib.contextmanager
def new_archive(path: Path) -> Iterator[Archive]:
    """Yield an empty archive, which is renamed to `path` at the end, and removed after an error.

    Raises InvalidRequest for a path that exists or cannot be written, or DiskFull.
    """
    partial = path.with_name(f".{path.name}.partial")
    if path.exists() or partial.exists():
        existing = path if path.exists() else partial
        raise InvalidRequest(f"{existing} exists already", field="path")
    try:
        with _creating(path, partial) as archive:
            yield archive
        partial.rename(path)
    except OSError as error:
        raise fault_of(error, path) from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _creating(path: Path, partial: Path) -> Iterator[Archive]:
    if path.suffix != SUFFIX:
        partial.mkdir(mode=0o700)
        yield _Folder(partial)
        return
    with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
        with zipfile.ZipFile(file, "w") as packed:
            yield _Zip(packed)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def read_archive(path: Path) -> Iterator[Archive]:
    """Yield a complete archive. Raises InvalidRequest if there is none at `path`."""
    if path.is_dir():
        yield _Folder(path)
        return
    try:
        packed = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is neither folder nor zip"
        raise InvalidRequest(f"{path} cannot be read: {reason}", field="path") from error
    with packed:
        yield _Zip(packed)


def read_parts(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file in parts."""
    while part := file.read(READ_BYTES):
        yield part


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is missing or damaged in this backup", field="path")
