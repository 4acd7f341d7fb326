"""Input files of batches: JSON lines, which are cut and checked while they are read. Pure."""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from shared.batches.digest_set import DigestSet
from shared.errors import MAX_MESSAGE_LEN, truncate
from shared.helpers.validation import complaint_of, reason_of
from shared.protocol.batch_log import LineError
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.value_limits import check_json

MAX_ERRORS = 100
"""Limit on the reported errors of one file."""
MAX_BLANK = 1000
"""Limit on the blank lines at the end of a file. A file of nothing else takes minutes to read."""
MAX_CUSTOM_ID_LEN = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ZIP_MARK = b"PK\x03\x04"
GZIP_MARK = b"\x1f\x8b"
BEGINNING_LEN = 4096
"""Bytes of a file that show whether it is a text."""
DIGEST_BYTES = 16
_BLANK = "the line is blank: remove it"


class LineTooLong(Exception):
    """A line has more bytes than the limit. Its end has not been read."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is too long")
        self.number = number


class RawLine(NamedTuple):
    """One line of a file, without its line break."""

    number: int
    offset: int
    content: bytes


class LineCutter:
    """Cuts a file into lines while it is read. At most one unfinished line is held."""

    def __init__(self, max_line_bytes: int, number: int = 1, offset: int = 0) -> None:
        """Begin with line `number` at `offset`."""
        self.next_line = number
        self.next_offset = offset
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()

    def feed(self, data: bytes, *, is_last: bool) -> Iterator[RawLine]:
        """Yield the lines that end in `data`. Raises LineTooLong."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            yield self._cut(data[start:end], 1)
            start = end + 1
        self._rest += data[start:]
        self._check_length(len(self._rest))
        if is_last and self._rest:
            yield self._cut(b"", 0)

    def _cut(self, end: bytes, num_break_bytes: int) -> RawLine:
        """Return the line of the held bytes and its `end`."""
        content = end
        if self._rest:
            content = bytes(self._rest + end)
            self._rest.clear()
        self._check_length(len(content))
        line = RawLine(self.next_line, self.next_offset, content)
        self.next_line += 1
        self.next_offset += len(content) + num_break_bytes
        return line

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_line_bytes:
            raise LineTooLong(self.next_line)


class InputLine(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _BodyHead(Struct, frozen=True):
    model: str
    stream: bool | None = None
    background: Any = None
    """True for a response that its client does not wait for. Images have a text here."""
    stream_format: Any = None
    """`sse` for the events of a speech."""


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """Line of a checked file."""

    custom_id: str
    model: str
    body: bytes


def read_line(content: bytes) -> ParsedLine:
    """Return the parts of a line that `InputCheck` has accepted."""
    line = decode_line(content)
    return ParsedLine(line.custom_id, _decode_head(line.body).model, bytes(line.body))


class InputLimits(Struct, frozen=True):
    """Limits on an input file."""

    endpoint: str
    models: Container[str]
    max_lines: int
    max_line_bytes: int


class InputCheck:
    """Checks a whole file, and collects its first errors."""

    def __init__(self, limits: InputLimits) -> None:
        self.errors: list[LineError] = []
        self.num_lines = 0
        """Lines up to the last one that is not blank."""
        self._limits = limits
        self._cutter = LineCutter(limits.max_line_bytes)
        self._digests = DigestSet()
        self._first_blank: int | None = None
        self._has_begun = False
        self.is_over = False
        """Whether the rest of the file need not be read."""

    def feed(self, data: bytes, *, is_last: bool) -> None:
        """Check the lines that end in `data`."""
        if not self._has_begun and (complaint := _wrong_format(data)) is not None:
            self._refuse("invalid_file", 1, complaint, over=True)
            return
        self._has_begun = True
        try:
            for line in self._cutter.feed(data, is_last=is_last):
                self._add(line)
                if self.is_over:
                    return
        except LineTooLong as error:
            limit = self._limits.max_line_bytes
            self._refuse(
                "line_too_long", error.number, f"a line may have at most {limit} bytes", over=True
            )
        if is_last and not self.num_lines and not self.errors:
            self._refuse("empty_file", None, "the file has no lines")

    def _add(self, line: RawLine) -> None:
        if not line.content.strip():
            self._first_blank = self._first_blank or line.number
            if line.number - self._first_blank >= MAX_BLANK:
                self._refuse("blank_line", self._first_blank, _BLANK, over=True)
            return
        if self._first_blank is not None:
            # Blank lines at the end of a file are ignored.
            self._refuse("blank_line", self._first_blank, _BLANK)
            self._first_blank = None
        self.num_lines = line.number
        limit = self._limits.max_lines
        if line.number > limit:
            message = f"a batch may have at most {limit} lines (batch.max_lines): split the file"
            self._refuse("too_many_lines", line.number, message, over=True)
        else:
            self._check(line)

    def _check(self, line: RawLine) -> None:
        complaint = find_fault(line.content, self._limits)
        if complaint is not None:
            self._refuse(complaint.code, line.number, complaint.message, complaint.param)
            return
        custom_id = decode_line(line.content).custom_id
        digest = hashlib.blake2b(custom_id.encode(), digest_size=DIGEST_BYTES).digest()
        if not self._digests.add(digest):
            message = f"an earlier line has the same custom_id {custom_id!r}"
            self._refuse("duplicate_custom_id", line.number, message, "custom_id")

    def _refuse(
        self,
        code: str,
        line: int | None,
        message: str,
        param: str | None = None,
        *,
        over: bool = False,
    ) -> None:
        # Both may contain a name from the line, which may have megabytes.
        param = param and truncate(param, MAX_MESSAGE_LEN)
        message = truncate(message, MAX_MESSAGE_LEN)
        self.errors.append(LineError(code, message, line, param))
        self.is_over = self.is_over or over or len(self.errors) == MAX_ERRORS


_NAMES = [b'"%b"' % name.encode() for name in (*InputLine.__struct_fields__, "model")]
decode_line = msgspec.json.Decoder(InputLine).decode
_decode_head = msgspec.json.Decoder(_BodyHead).decode


def find_fault(content: bytes, limits: InputLimits) -> LineError | None:
    """Return the first fault of a line, without its number."""
    try:
        content.decode()
        check_json(content)
        line = decode_line(content)
    except UnicodeDecodeError as error:
        return LineError("invalid_json_line", f"the line is not UTF-8 at byte {error.start + 1}")
    except RecursionError:
        return LineError("invalid_json_line", "the line is nested too deeply")
    except msgspec.ValidationError as error:
        return _invalid(error, InputLine)
    except msgspec.DecodeError as error:
        return LineError("invalid_json_line", f"the line is not valid JSON: {reason_of(error)}")
    if (name := _repeated_key(content)) is not None:
        return LineError("invalid_line", f"{name} is given twice", param=name)
    return _fault_of(line, limits)


def _fault_of(line: InputLine, limits: InputLimits) -> LineError | None:
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_LEN:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_LEN} characters"
        return LineError("invalid_line", message, param="custom_id")
    if line.method != "POST":
        return LineError("invalid_method", "method must be POST", param="method")
    if line.url != limits.endpoint:
        message = f"url must be the endpoint of the batch, {limits.endpoint}"
        return LineError("mismatched_endpoint", message, param="url")
    try:
        head = _decode_head(line.body)
    except UNDECODABLE as error:
        if not isinstance(error, msgspec.ValidationError):
            return LineError("invalid_json_line", "body is not valid JSON", param="body")
        return _invalid(error, _BodyHead, "body")
    if head.stream or head.stream_format == "sse":
        name = "stream" if head.stream else "stream_format"
        message = f"a line of a batch cannot be streamed: leave {name} out"
        return LineError("invalid_line", message, param=f"body.{name}")
    if head.background is True:
        message = "a line of a batch waits for its answer: leave background out"
        return LineError("invalid_line", message, param="body.background")
    if head.model not in limits.models:
        return LineError("model_not_found", f"no model {head.model!r}", param="body.model")
    return None


def _invalid(error: msgspec.ValidationError, kind: Any, root: str = "") -> LineError:
    complaint = complaint_of(error, kind, root)
    return LineError("invalid_line", complaint.sentence("the line"), param=complaint.path or None)


def _wrong_format(content: bytes) -> str | None:
    """Return the complaint about the beginning of a file that has another format."""
    if content.startswith(BYTE_ORDER_MARK):
        return "the file begins with a byte order mark: save it as UTF-8 without one"
    if content.startswith((ZIP_MARK, GZIP_MARK)):
        return "the file is compressed: upload the JSON lines themselves"
    if b"\0" in content[:BEGINNING_LEN]:
        return "the file is not a text in UTF-8: upload JSON lines in UTF-8"
    return None


class _Object(dict[str, Any]):
    """A JSON object, and the first of its names that is given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.repeated = next((name for name, count in counts.items() if count > 1), None)


def _repeated_key(content: bytes) -> str | None:
    """Return a field of the line, or its model, that is given twice.

    A decoder would use the last one.
    """
    # Nearly all lines pass here. Content of bodies may contain the names as well.
    if all(content.count(name) == 1 for name in _NAMES):
        return None
    # Python refuses to read integers of many digits, and their values do not matter here.
    line = json.loads(content, object_pairs_hook=_Object, parse_int=str)
    if line.repeated is not None:
        return str(line.repeated)
    body = line["body"]
    repeated = body.repeated if isinstance(body, _Object) else None
    return None if repeated is None else f"body.{repeated}"
