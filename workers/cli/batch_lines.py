"""Lines of requests about files, for `pagemill batch make`."""

import base64
import json
import math
import mimetypes
import re
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.batches.input_file import MAX_CUSTOM_ID_LEN
from shared.batches.orders import ENDPOINTS
from shared.errors import InvalidMedia, InvalidRequest
from shared.helpers.validation import reason_of
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO, FileKind
from shared.responses.conversation import kind_of_file
from workers.cli.inputs import read_media

CHAT = ENDPOINTS[0]
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")
MAX_SCHEMA_NAME_LEN = 64

Upload = Callable[[Path], Awaitable[str]]
"""Uploads a file, and returns the SHA-256 of its bytes."""


@dataclass(frozen=True, slots=True)
class Question:
    """The parts that all lines have in common."""

    model: str
    prompt: str
    system: str | None
    response_format: dict[str, Any] | None
    sampling: Mapping[str, float]

    def body_about(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request with a message part for its file."""
        content = [part, {"type": "text", "text": self.prompt}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        body = {"model": self.model, "messages": messages, **self.sampling}
        form = self.response_format
        return body if form is None else body | {"response_format": form}


@dataclass(frozen=True, slots=True)
class Source:
    """File, or some pages of a document, that one line is about."""

    path: Path
    kind: FileKind
    custom_id: str
    num_bytes: int
    pages: str | None = None

    @property
    def inline_len(self) -> int:
        """Length of the file in a line, as base64."""
        return 4 * math.ceil(self.num_bytes / 3)


def sources_of(paths: Sequence[Path], pages_per_line: int) -> list[Source]:
    """Return what the lines are about, in the order of the paths, and by name within a folder.

    Raises InvalidMedia and InvalidRequest.
    """
    files = list(_files_in(paths))
    if not files:
        raise InvalidRequest("name at least one file, or a folder with files", field="files")
    ids = _custom_ids(files)
    return [source for path in files for source in _sources(path, ids[path], pages_per_line)]


def _files_in(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of these paths. Other files of a folder are skipped."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = sorted(file for file in path.iterdir() if kind_of_file(file.name) is not None)
        if not files:
            raise InvalidMedia(
                f"{path}: the folder has no images, sounds, videos or PDF files", field="files"
            )
        yield from files


def _custom_ids(files: Sequence[Path]) -> dict[Path, str]:
    """Return unique ids: the names of the files, or their paths if names are equal."""
    same_files = Counter(path.resolve() for path in files)
    for path in files:
        if same_files[path.resolve()] > 1:
            raise InvalidRequest(f"{path} is named twice", field="files")
    names = Counter(path.name for path in files)
    ids = {path: path.name if names[path.name] == 1 else path.as_posix() for path in files}
    for path, custom_id in ids.items():
        # Room for the pages of a document.
        if len(custom_id) > MAX_CUSTOM_ID_LEN - 32:
            raise InvalidRequest(f"{path}: the path is too long for a custom_id", field="files")
    return ids


def _sources(path: Path, custom_id: str, pages_per_line: int) -> Iterator[Source]:
    kind = kind_of_file(path.name)
    if kind is None:
        raise InvalidMedia(
            f"{path}: not an image, a sound, a video or a PDF file by its ending", field="files"
        )
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise InvalidMedia(f"{path}: {error.strerror}", field="files") from error
    num_pages = _count_pages(path) if kind == DOCUMENT else 0
    if num_pages <= pages_per_line:
        yield Source(path, kind, custom_id, num_bytes)
        return
    for first in range(1, num_pages + 1, pages_per_line):
        last = min(first + pages_per_line - 1, num_pages)
        pages = str(first) if first == last else f"{first}-{last}"
        yield Source(path, kind, f"{custom_id}#{pages}", num_bytes, pages)


def _count_pages(path: Path) -> int:
    import pypdfium2 as pdfium

    try:
        document = pdfium.PdfDocument(read_media(path, "files"))
    except pdfium.PdfiumError as error:
        raise InvalidMedia(
            f"{path}: the document is damaged, or needs a password", field="files"
        ) from error
    try:
        return len(document)
    finally:
        document.close()


def upload_reason(
    sources: Sequence[Source], question: Question, max_file_mib: int, max_line_mib: int
) -> str | None:
    """Return why the files cannot be part of the lines; None if they can."""
    other_len = len(json.dumps(question.body_about({}))) + MAX_CUSTOM_ID_LEN
    lengths = [source.inline_len + other_len for source in sources]
    if (longest := max(lengths)) > max_line_mib * 2**20:
        path = sources[lengths.index(longest)].path
        return f"{path} is too large for a line (batch.max_line_mib: {max_line_mib})"
    if (total := sum(lengths)) > max_file_mib * 2**20:
        return (
            f"all files have {math.ceil(total / 2**20)} MiB, too much for one file of requests"
            f" (batch.max_file_mib: {max_file_mib})"
        )
    return None


async def lines_about(
    sources: Sequence[Source], question: Question, upload: Upload | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield a line for each source. Without `upload`, the files are in the lines as `data:` URLs.

    Raises InvalidMedia, and the errors of `upload`.
    """
    for source in sources:
        name = None if upload is None else await upload(source.path)
        part = _inline_part(source) if name is None else _named_part(source, name)
        yield {
            "custom_id": source.custom_id,
            "method": "POST",
            "url": CHAT,
            "body": question.body_about(part),
        }


def _inline_part(source: Source) -> dict[str, Any]:
    path = source.path
    content = base64.b64encode(read_media(path, "files")).decode()
    if source.kind == AUDIO:
        ending = path.suffix.removeprefix(".").lower()
        return {"type": "input_audio", "input_audio": {"data": content, "format": ending}}
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return _url_part(source, f"data:{media_type};base64,{content}", "file_data")


def _named_part(source: Source, name: str) -> dict[str, Any]:
    if source.kind == DOCUMENT:
        return _url_part(source, f"file-{name}", "file_id")
    return _url_part(source, f"media:{name}", "")


def _url_part(source: Source, url: str, document_field: str) -> dict[str, Any]:
    if source.kind == DOCUMENT:
        file = {document_field: url, "filename": source.path.name}
        pages = {} if source.pages is None else {"pages": source.pages}
        return {"type": "file", "file": file | pages}
    kinds: dict[FileKind, str] = {IMAGE: "image_url", VIDEO: "video_url", AUDIO: "audio_url"}
    kind = kinds[source.kind]
    return {"type": kind, kind: {"url": url}}


def read_schema(file: Path) -> dict[str, Any]:
    """Return the response format of a file with a JSON schema. Raises InvalidRequest."""
    try:
        schema = json.loads(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}", field="schema") from error
    except ValueError as error:
        raise InvalidRequest(
            f"{file}: not valid JSON: {reason_of(error)}", field="schema"
        ) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{file}: a JSON schema is an object", field="schema")
    name = _NOT_IN_NAMES.sub("_", file.stem)[:MAX_SCHEMA_NAME_LEN]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
