"""Bodies of `multipart/form-data`, parsed while they arrive or at once. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from shared.errors import InvalidRequest

MAX_PARTS = 64
MAX_HEAD_LEN = 4096
MAX_VALUE_BYTES = 16_384
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")

_CHARSETS = ("us-ascii", "utf-8", "iso-8859-1")
"""Charsets that the name of a file may be in."""

Param = str | tuple[str | None, str | None, str]
"""A parameter of a header: text, or charset, language and text (RFC 8187)."""


@dataclass(frozen=True, slots=True)
class FileHead:
    """The beginning of a file. The events of type bytes after it are its content."""

    field: str
    filename: str


@dataclass(frozen=True, slots=True)
class FormValue:
    field: str
    value: str


FormEvent = FileHead | FormValue | bytes


class FormStream:
    """Parser of a body that arrives in pieces.

    It holds back no more of a file than the bytes that may be the beginning of a boundary.
    """

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequest."""
        self._delimiter = b"\r\n" + _boundary_of(content_type)
        # The first boundary needs no line before it.
        self._buffer = bytearray(b"\r\n")
        self._part: tuple[str, str | None] | None = None
        """Field and file name of the part that is being read; None between parts."""
        self._num_parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> list[FormEvent]:
        """Add bytes, and return the events that they complete. Raises InvalidRequest."""
        if self.is_complete:
            return []  # Bytes after the last boundary have no meaning.
        self._buffer += data
        events: list[FormEvent] = []
        while not self.is_complete and self._advance(events):
            pass
        return events

    def _advance(self, events: list[FormEvent]) -> bool:
        """Read a head or content. Return whether the buffer may contain further parts."""
        if self._part is None:
            return self._read_head(events)
        field, filename = self._part
        end = self._buffer.find(self._delimiter)
        if end < 0:
            if filename is None:
                self._check_value(len(self._buffer))
                return False
            # The rest may be the beginning of the boundary.
            rest_len = len(self._delimiter) - 1
            if len(self._buffer) > rest_len:
                events.append(bytes(self._buffer[:-rest_len]))
                del self._buffer[:-rest_len]
            return False
        content = bytes(self._buffer[:end])
        if filename is not None:
            events.append(content)
        else:
            self._check_value(end)
            try:
                events.append(FormValue(field, content.decode()))
            except UnicodeDecodeError:
                raise _malformed(f"{field} is not UTF-8") from None
        del self._buffer[:end]
        self._part = None
        return True

    def _read_head(self, events: list[FormEvent]) -> bool:
        """Read a boundary and the head after it, once both have arrived."""
        buffer, length = self._buffer, len(self._delimiter)
        if len(buffer) < length + 2:
            return False
        if not buffer.startswith(self._delimiter):
            raise _malformed("it does not begin with its boundary")
        if buffer[length : length + 2] == b"--":
            self.is_complete = True
            return False
        if buffer[length : length + 2] != b"\r\n":
            raise _malformed("a boundary is not followed by a line")
        end = buffer.find(b"\r\n\r\n", length)
        if end < 0 or end > length + MAX_HEAD_LEN:
            if len(buffer) > length + MAX_HEAD_LEN:
                raise _malformed(f"the head of a part has more than {MAX_HEAD_LEN} bytes")
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        field, filename = self._part = _read_head_of(bytes(buffer[length + 2 : end + 2]))
        if filename is not None:
            events.append(FileHead(field, filename))
        del buffer[: end + 4]
        return True

    def _check_value(self, num_bytes: int) -> None:
        if num_bytes > MAX_VALUE_BYTES + len(self._delimiter):
            raise _malformed(f"a field has more than {MAX_VALUE_BYTES} bytes")


class FormData(NamedTuple):
    values: Mapping[str, list[str]]
    """Texts by field, which may occur more than once."""
    files: Mapping[str, list[bytes]]
    """Contents of files by field, which may occur more than once."""


def parse_form(body: bytes, content_type: str) -> FormData:
    """Return the parts of a body. Raises InvalidRequest for one that is not well formed."""
    form = FormStream(content_type)
    values: dict[str, list[str]] = {}
    files: dict[str, list[bytes]] = {}
    name = ""
    for event in form.feed(body):
        match event:
            case FileHead(name):
                pass
            case FormValue(field, value):
                values.setdefault(field, []).append(value)
            case bytes():
                files.setdefault(name, []).append(event)
    if not form.is_complete:
        raise _malformed("it ends before its last boundary")
    return FormData(values, files)


def _boundary_of(content_type: str) -> bytes:
    """Return the line that separates parts. Raises InvalidRequest."""
    # Python's parser raises ValueError for a longer number in the name of a parameter.
    if len(content_type) > MAX_HEAD_LEN:
        raise _malformed(f"its Content-Type has more than {MAX_HEAD_LEN} characters")
    head = Message()
    head["content-type"] = content_type
    boundary = _read_param(head, "boundary", "content-type")
    if not isinstance(boundary, str) or _BOUNDARY.fullmatch(boundary) is None:
        raise _malformed("its Content-Type has no boundary")
    return b"--" + boundary.encode()


def _read_head_of(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and the name of its file if it is one."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            parsed = Message()
            parsed["content-disposition"] = value.strip()
            name = _read_param(parsed, "name", "content-disposition")
            if isinstance(name, str) and parsed.get_content_disposition() == "form-data":
                filename = _read_param(parsed, "filename", "content-disposition")
                return name, None if filename is None else _read_filename(filename)
    raise _malformed("a part has no name")


def _read_param(head: Message, name: str, header: str) -> Param | None:
    try:
        return head.get_param(name, None, header)
    except TypeError:
        # Python's parser sorts the pieces of a parameter by number. A whole one has None for it.
        raise _malformed(f"a parameter of its {header} is there both whole and in pieces") from None


def _read_filename(value: Param) -> str:
    """Return the decoded name of a file. Raises InvalidRequest."""
    # Some of Python's codecs raise other errors, or return text that UTF-8 cannot encode.
    if isinstance(value, tuple) and (value[0] or "us-ascii").lower() not in _CHARSETS:
        raise _malformed(f"a file's name must be in one of {', '.join(_CHARSETS)}")
    return collapse_rfc2231_value(value)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {reason}")
