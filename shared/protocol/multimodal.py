"""Multimodal items after rendering, and the hash of their content."""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.protocol.versions import since

Modality = Literal["image", "video", "audio"]
"""Kinds of media in requests."""
IMAGE: Modality = "image"
VIDEO: Modality = "video"
AUDIO: Modality = "audio"

FileKind = Modality | Literal["document"]
"""Kinds of files in requests. The pages of a document become images."""
DOCUMENT: FileKind = "document"


MEDIA_SCHEME = "media:"
"""Scheme of the URL of a stored file."""

Overflow = Literal["refuse", "cut"]


class Page(msgspec.Struct, frozen=True):
    """A page of a document, and the resolution of its image."""

    number: int
    """Number from 1."""
    dpi: int


class FrameSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of a request for a file. The model's family decides unset options of videos."""

    fps: float | None = None
    """Frames per second of the video."""
    num_frames: int | None = None
    """Number of frames of the whole video, instead of `fps`."""
    max_frames: int | None = None
    """Maximum number of frames, also with `fps`."""
    overflow: Overflow = "refuse"
    """Treatment of a sound that is longer than the model's limit."""
    use_audio: bool = False
    """Whether the model also gets the sound of the video."""
    page: Page | None = None
    """The page of a document that is the image."""


DEFAULT_SAMPLING = FrameSampling()


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True):
    """Range of tokens in the expanded prompt that belongs to one item."""

    offset: int
    length: int
    is_embed: bytes | None = None
    """Bit mask of the tokens that embeddings replace; None for all tokens.

    The first token is the lowest bit of the first byte. The other tokens are text, such as the ends
    of rows.
    """

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else len(self.embed_indexes())

    def embed_indexes(self) -> list[int]:
        """Return the indexes of the tokens that embeddings replace, counted from `offset`."""
        mask = b"\xff" * -(-self.length // 8) if self.is_embed is None else self.is_embed
        return [i for i in range(self.length) if mask[i // 8] >> i % 8 & 1]


class Placement(msgspec.Struct, frozen=True):
    """Tokens that replace an item's placeholder token, if some of them are text.

    Embeddings replace the tokens in `embed_ids`. The others are text, such as the times of frames.
    """

    token_ids: list[int]
    embed_ids: tuple[int, ...]
    marks: tuple[int, int] | None = None
    """Tokens before and after the placeholder token that are replaced together with it."""

    def is_embed(self) -> bytes:
        """Return `PlaceholderRange.is_embed` for these tokens."""
        mask = bytearray(-(-len(self.token_ids) // 8))
        for i, token_id in enumerate(self.token_ids):
            if token_id in self.embed_ids:
                mask[i // 8] |= 1 << i % 8
        return bytes(mask)


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """Large payload in a worker's memory. The key is the permission to read it."""

    worker: str
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    num_bytes: Annotated[int, Meta(ge=0)]


class MultiModalKwargsItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Processed image, video or sound, as input of the model.

    Small tensors are in the same message: `fields` maps a field name to the index of its tensor in
    the envelope's tensor table. Large tensors are in a blob, which is an envelope with this map in
    its head.
    """

    modality: Annotated[str, since(3, VIDEO, AUDIO)]
    mm_hash: str
    placeholder: PlaceholderRange
    fields: dict[str, int] = {}
    blob: BlobRef | None = None
    embedding: str | None = None
    """Key of the embeddings that an encoder computes; then `fields` contain only metadata."""


_HASH = re.compile(r"[0-9a-f]{64}")


def is_hash(name: str) -> bool:
    """Return whether `name` has the form of a `content_hash`."""
    return _HASH.fullmatch(name) is not None


HashPart = str | bytes | memoryview | int | Sequence["HashPart"]


def content_hash(*parts: HashPart) -> str:
    """Return the SHA-256 over typed, length-framed parts as 64 hex digits.

    Each part is hashed with its type and its length, so different lists of parts never have the
    same preimage: `("ab", "c")` and `("a", "bc")`, or `1` and `"1"`, differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        _update(digest, part)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", part: HashPart) -> None:
    match part:
        case str():
            _frame(digest, b"s", part.encode())
        case bool() | int():
            _frame(digest, b"i", str(int(part)).encode())
        case bytes() | memoryview():
            _frame(digest, b"b", part)
        case _:
            digest.update(b"l" + len(part).to_bytes(8, "little"))
            for inner in part:
                _update(digest, inner)


def _frame(digest: "hashlib._Hash", tag: bytes, data: bytes | memoryview) -> None:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    digest.update(tag + size.to_bytes(8, "little"))
    digest.update(data)


def embedding_key(model: str, mm_hash: str) -> str:
    """Return the name of an item's embeddings by this model's tower."""
    return content_hash("embedding", model, mm_hash)
