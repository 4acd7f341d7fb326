"""Log file of `pagemill up`, with the log of all its workers as one JSON object per line.

Other lines are output of libraries, and tracebacks of processes that could not start.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError, NotFound

LEVELS = ("debug", "info", "warning", "error", "critical")
BLOCK_BYTES = 65_536
# Fields with a separate place in a rendered line.
HEAD_FIELDS = {"timestamp", "level", "role", "worker", "event", "exception"}

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of lines. Lines that are not JSON pass only the empty filter."""

    role: str | None = None
    level: str | None = None
    """Least severe level to accept."""
    worker: str | None = None
    """Id of a worker, or the beginning of it."""
    request: str | None = None

    def accepts(self, line: bytes) -> bool:
        if self == Filter():
            return True
        event = parse(line)
        return (
            event is not None
            and self.role in (None, event.get("role"))
            and (self.worker is None or str(event.get("worker", "")).startswith(self.worker))
            and self.request in (None, event.get("request_id"))
            and (self.level is None or _rank(event.get("level")) >= _rank(self.level))
        )


@contextlib.contextmanager
def open_for_append(file: Path) -> Iterator[int]:
    """Open the file, readable by its owner alone, and create its folder. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"log_file: {file}: {error.strerror}", field="log_file") from error
    try:
        yield fd
    finally:
        os.close(fd)


def size_of(file: Path | None) -> int:
    return 0 if file is None or not file.exists() else file.stat().st_size


def errors_since(file: Path | None, offset: int) -> list[str]:
    """Return the rendered errors after `offset`. There are none if the log is not a file."""
    if file is None:
        return []
    with file.open("rb") as opened:
        opened.seek(offset)
        errors = Filter(level="error")
        return [render(line) for line in opened if errors.accepts(line)]


# -- reading ----------------------------------------------------------------------------------


class LogReader:
    """Reader of the last lines of a log, and of lines that are appended after them."""

    def __init__(self, file: Path, line_filter: Filter) -> None:
        """Raises NotFound."""
        self._file = file
        self._filter = line_filter
        try:
            self._opened = file.open("rb")
        except OSError as error:
            raise NotFound(f"{file}: {error.strerror}; `pagemill up` writes it") from error

    def last(self, num_lines: int) -> list[bytes]:
        """Return the last lines that pass the filter, oldest first. `more` continues after them."""
        end = _end_of_lines(self._opened)
        newest = []
        if num_lines > 0:
            for line in _lines_backwards(self._opened, end):
                if self._filter.accepts(line):
                    newest.append(line)
                    if len(newest) == num_lines:
                        break
        self._opened.seek(end)
        return newest[::-1]

    def more(self) -> list[bytes]:
        """Return the lines since the last call that are complete and pass the filter.

        A file that was replaced or emptied is read from its beginning.
        """
        if self._was_replaced():
            with contextlib.suppress(OSError):
                replacement = self._file.open("rb")
                self._opened.close()
                self._opened = replacement
        lines = []
        while (line := self._opened.readline()).endswith(b"\n"):
            if self._filter.accepts(line):
                lines.append(line)
        self._opened.seek(-len(line), io.SEEK_CUR)
        return lines

    def close(self) -> None:
        self._opened.close()

    def _was_replaced(self) -> bool:
        own = os.fstat(self._opened.fileno())
        try:
            there = self._file.stat()
        except OSError:
            return False
        return there.st_ino != own.st_ino or there.st_size < self._opened.tell()


def _end_of_lines(opened: io.BufferedReader) -> int:
    """Return the position after the last complete line."""
    end = opened.seek(0, io.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        opened.seek(begin)
        if (position := opened.read(end - begin).rfind(b"\n")) >= 0:
            return begin + position + 1
        end = begin
    return 0


def _lines_backwards(opened: io.BufferedReader, end: int) -> Iterator[bytes]:
    """Yield the lines before `end`, newest first, without empty lines."""
    rest = b""
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        opened.seek(begin)
        first, *lines = (opened.read(end - begin) + rest).split(b"\n")
        yield from (line for line in reversed(lines) if line)
        rest, end = first, begin
    if rest:
        yield rest


# -- for people -------------------------------------------------------------------------------


def parse(line: bytes) -> Event | None:
    """Return the event of a line, or None if it is no JSON object."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def render(line: bytes) -> str:
    """Return a line in readable form, followed by its traceback."""
    event = parse(line)
    if event is None:
        return _printable(line.decode(errors="replace").rstrip("\n"))
    time = str(event.get("timestamp", "")).replace("T", " ")[:23]
    source = event.get("worker") or event.get("role", "")
    head = f"{time:<23} {event.get('level', ''):<7} {source!s:<20} {event.get('event', '')}"
    fields = [f"{name}={_value(event[name])}" for name in event if name not in HEAD_FIELDS]
    text = _printable(" ".join([head, *fields]))
    if "exception" in event:
        lines = str(event["exception"]).splitlines()
        text = "\n".join([text, *(f"    {_printable(traced)}" for traced in lines)])
    return text


def _value(value: object) -> str:
    if isinstance(value, str) and value and not any(map(str.isspace, value)):
        return value
    return msgspec.json.encode(value).decode()


def _printable(text: str) -> str:
    """Escape control characters, which names of a client may contain, for the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _rank(level: object) -> int:
    return LEVELS.index(level) if level in LEVELS else 0
