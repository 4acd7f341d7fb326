"""Order of lines: within a look-ahead, lines with an equal beginning follow each other. Pure.

So an engine finds their prefixes in its cache, and a renderer and an encoder find their images.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from shared.protocol.encoding import UNDECODABLE

MAX_LINES = 4096
MAX_BYTES = 4 * 2**20
"""Limit on the bodies in the look-ahead of one batch."""
TEXT_LEN = 256
"""Bytes of the first text that count as a beginning. Its end differs from line to line."""

T = TypeVar("T")
Beginning = tuple[bytes, bytes, bytes]
"""Hashes of the system message with the tools, of the first image, and of the first text."""


class _Message(Struct, frozen=True):
    role: str = ""
    content: Raw = Raw(b"")


class _Part(Struct, frozen=True):
    text: str = ""
    image_url: Raw = Raw(b"")
    file_id: Raw = Raw(b"")


class _Body(Struct, frozen=True):
    """Fields with the prompt, under the names of all endpoints."""

    messages: list[_Message] = []
    input: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    instructions: Raw = Raw(b"")
    tools: Raw = Raw(b"")


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_items = msgspec.json.Decoder(list[_Message]).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode


def beginning_of(content: bytes) -> Beginning:
    """Return the beginning of the prompt in a body; an equal one for all bodies of another form."""
    try:
        body = _decode_body(content)
    except UNDECODABLE:
        return b"", b"", b""
    messages = body.messages or _decode_or(_decode_items, body.input, [])
    system = [bytes(body.tools), bytes(body.instructions)]
    system += [bytes(m.content) for m in messages if m.role in ("system", "developer")]
    image, text = b"", bytes(body.prompt) or bytes(body.input)
    for message in messages:
        if message.role != "user":
            continue
        parts = _decode_or(_decode_parts, message.content, [])
        image = next((raw for p in parts if (raw := bytes(p.image_url) or bytes(p.file_id))), b"")
        text = next((p.text.encode() for p in parts if p.text), bytes(message.content))
        break
    return _digest(*system), _digest(image), _digest(text[:TEXT_LEN])


def _decode_or(decode: Any, content: Raw, default: Any) -> Any:
    try:
        return decode(content)
    except UNDECODABLE:
        return default


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


def in_order(beginnings: Sequence[Beginning]) -> list[int]:
    """Return the positions of lines in the order in which they run.

    Lines with the same system message follow each other, and among them lines with the same image,
    and among these lines with the same text. Groups are in the order of their first lines.
    """
    firsts: dict[tuple[bytes, ...], int] = {}
    for position, beginning in enumerate(beginnings):
        for depth in (1, 2, 3):
            firsts.setdefault(beginning[:depth], position)

    def place(position: int) -> tuple[int, ...]:
        return tuple(firsts[beginnings[position][:depth]] for depth in (1, 2, 3))

    return sorted(range(len(beginnings)), key=place)


class LookAhead(Generic[T]):
    """Lines that were read and have not begun."""

    def __init__(self) -> None:
        self._lines: list[T] = []
        self._beginnings: list[Beginning] = []
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self._lines) >= MAX_LINES or self._num_bytes >= MAX_BYTES

    def add(self, line: T, body: bytes) -> None:
        self._lines.append(line)
        self._beginnings.append(beginning_of(body))
        self._num_bytes += len(body)

    def take(self) -> Iterator[T]:
        """Remove all lines, and yield them in the order in which they run."""
        lines, order = self._lines, in_order(self._beginnings)
        self._lines, self._beginnings, self._num_bytes = [], [], 0
        for position in order:
            yield lines[position]
