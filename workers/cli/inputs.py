"""Texts and files that commands read: `@FILE` in a text names a file, and `-` is stdin."""

import mimetypes
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from shared.errors import InvalidMedia, InvalidRequest
from shared.helpers.validation import reason_of
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO, FileKind
from shared.responses.conversation import kind_of_file

STDIN = "-"
_FILE = re.compile(r'(?:(?<=\s)|^)@(?:"([^"]+)"|(\S+))([ \t]*)')
_PUNCTUATION = ".,:;!?)"
# The first bytes of files, for stdin and for names without a known ending.
_MAGIC: tuple[tuple[re.Pattern[bytes], FileKind], ...] = (
    (re.compile(rb"\x89PNG|\xff\xd8\xff|BM|GIF8|RIFF....WEBP", re.DOTALL), IMAGE),
    (re.compile(rb"RIFF....WAVE|OggS|fLaC|ID3|\xff[\xe2-\xfb]", re.DOTALL), AUDIO),
    (re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI ", re.DOTALL), VIDEO),
    (re.compile(rb"%PDF"), DOCUMENT),
)
# The beginning of a frame of a GIF, a WebP and a PNG that move.
_FRAME = re.compile(rb"\x21\xf9\x04.{4}\0[\x21\x2c]|ANMF|fcTL", re.DOTALL)


class Medium(NamedTuple):
    """File for a model. Its name is for errors."""

    name: str
    kind: FileKind
    data: bytes


def read_input(text: str, *, takes_stdin: bool = True) -> tuple[str, list[Medium]]:
    """Return a text with its text files in it and without its media, and these media.

    A word with an `@` that names no file stays in the text, unless it has the ending of a medium or
    a text; `@@` stands for an `@`. Raises InvalidMedia for a file that cannot be read.
    """
    if takes_stdin and text == STDIN:
        return _decode("stdin", _read_stdin()), []
    media: list[Medium] = []

    def take(match: re.Match[str]) -> str:
        name, rest = match[1] or match[2], match[3]
        if name.startswith("@"):
            return match[0].replace("@@", "@", 1)
        if match[2] and not _is_file(name):
            name = name.rstrip(_PUNCTUATION)
            rest = match[2].removeprefix(name) + rest
        is_stdin = takes_stdin and name == STDIN
        if not is_stdin and not _is_file(name):
            if name and _is_folder(name):
                raise InvalidMedia(f"{name} is a folder; name a file", field="text")
            return match[0]
        data = _read_stdin() if is_stdin else read_media(_path_of(name), "text")
        kind = _kind_of(name, data)
        if kind is None:
            return _decode(name, data) + rest
        media.append(Medium(name, kind, data))
        return rest.lstrip(" \t")

    text = _FILE.sub(take, text)
    return text.strip() if media else text, media


def find_unmarked(text: str) -> list[str]:
    """Return the words of a text that name media which exist, and have no `@`."""
    words = [word.rstrip(_PUNCTUATION) for word in text.split()]
    return [word for word in words if kind_of_file(word) is not None and _path_of(word).is_file()]


def read_text(text: str, *kinds: FileKind) -> tuple[str, list[Medium]]:
    """Return like `read_input`. Raises InvalidRequest for a medium of no such kind."""
    text, media = read_input(text)
    for medium in media:
        if medium.kind not in kinds:
            takes = " and ".join(("text", *(f"{kind}s" for kind in kinds)))
            raise InvalidRequest(
                f"{medium.name} is a file of kind {medium.kind}; this command takes {takes}",
                field="text",
            )
    return text, media


def read_media(path: Path, field: str) -> bytes:
    """Return the bytes of a file. Raises InvalidMedia with `field` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidMedia(f"{path}: {error.strerror}", field=field) from error


def _is_file(name: str) -> bool:
    """Return whether a word names a file: by its ending, or because the file exists."""
    if kind_of_file(name) is not None:
        return True
    is_text = (mimetypes.guess_type(name)[0] or "").startswith("text/")
    try:
        return is_text or _path_of(name).is_file()
    except (OSError, ValueError):  # No name of a file.
        return False


def _is_folder(name: str) -> bool:
    try:
        return _path_of(name).is_dir()
    except (OSError, ValueError):  # No name of a folder.
        return False


def _path_of(name: str) -> Path:
    # Path.expanduser raises RuntimeError for the home of an unknown user.
    return Path(os.path.expanduser(name))


def _kind_of(name: str, data: bytes) -> FileKind | None:
    """Return the kind of a file by its name or its first bytes; None for a text.

    An image that moves is a video.
    """
    kind = kind_of_file(name)
    if kind is None:
        kind = next((kind for magic, kind in _MAGIC if magic.match(data)), None)
    moves = kind == IMAGE and len(_FRAME.findall(data)) > 1
    return VIDEO if moves else kind


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidMedia(
            f"{name}: it is neither an image, a sound, a video, a PDF file nor a text in UTF-8",
            field="text",
        ) from error


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed", field="stdin")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise InvalidMedia(f"stdin: {reason_of(error)}", field="stdin") from error
