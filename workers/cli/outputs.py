"""Files that commands write, and the error of a command for an error of the operating system."""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from errno import EDQUOT, ENOSPC
from itertools import chain
from pathlib import Path
from types import TracebackType

from shared.errors import DiskFull, InvalidRequest
from shared.helpers.validation import reason_of

SPEECH_FILE = Path("speech.wav")


def fault_of(error: OSError, place: object = None) -> DiskFull | InvalidRequest:
    """Return the error of a command that could not use a file, or stdout."""
    message = f"{place or error.filename or 'stdout'}: {reason_of(error)}"
    if error.errno in (ENOSPC, EDQUOT):
        return DiskFull(message)
    return InvalidRequest(message, field="output")


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise errors of the operating system as `fault_of` this file."""
    try:
        yield
    except OSError as error:
        raise fault_of(error, place) from error


class NewFile:
    """File with the suffix `.part` that `keep` renames; without it, the file is removed.

    One command at a time writes it.

    A device or a pipe is written in place. An existing file stays until it is replaced.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises InvalidRequest or DiskFull."""
        self.path = path
        with writing(path):
            is_other = path.exists() and not path.is_file()
            if path.exists() and not os.access(path, os.W_OK):
                path.open("ab").close()  # It says why.
            # Path.resolve raises RuntimeError for a link to itself.
            self._target = path if is_other else Path(os.path.realpath(path))
            self._part = path if is_other else self._target.with_name(f"{self._target.name}.part")
            self.stream = open(self._part, "wb", opener=_open_uncut)  # noqa: SIM115
        if not is_other:
            self._claim()

    def _claim(self) -> None:
        """Begin an empty file. Raises InvalidRequest while another command writes it."""
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.stream.close()
            message = f"{self._part}: another command writes this file"
            raise InvalidRequest(message, field="output") from None
        self.stream.truncate(0)

    def keep(self) -> None:
        """Close the file and give it its name. Raises InvalidRequest or DiskFull."""
        with writing(self.path):
            self.stream.close()
            if self._part != self._target:
                self._part.replace(self._target)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        if self._part != self._target:
            self._part.unlink(missing_ok=True)


def _open_uncut(path: str, flags: int) -> int:
    """Open a file that another command may write, without a change of its content."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def write_file(path: Path, data: bytes) -> None:
    """Write a file. Raises InvalidRequest or DiskFull, and then leaves none."""
    with NewFile(path) as file:
        with writing(path):
            file.stream.write(data)
        file.keep()


def numbered(path: Path, count: int) -> list[Path]:
    """Return the names of several files: `path` alone for one, else with the numbers from 1."""
    if count == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{number + 1}") for number in range(count)]


def free_path(path: Path, count: int = 1) -> Path:
    """Return `path`, or the first name with a number from 2, for which `count` files are new."""
    candidates = chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2)))
    return next(p for p in candidates if not any(f.exists() for f in numbered(p, count)))


def check_output(path: Path) -> None:
    """Raise InvalidRequest or DiskFull for a file that cannot be written.

    It is opened before work begins, because the work may take minutes.
    """
    with NewFile(path):
        pass
