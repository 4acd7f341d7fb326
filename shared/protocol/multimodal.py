"""Multimodal items as they are after rendering, and the hash that names their content."""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.protocol.versions import since

Modality = Literal["image", "video", "audio"]
"""Kinds of media that a request may hold."""
IMAGE: Modality = "image"
VIDEO: Modality = "video"
AUDIO: Modality = "audio"


MEDIA_SCHEME = "media:"
"""Scheme of the URL of a stored file."""

Overflow = Literal["refuse", "cut"]


class FrameSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request wants of a video or a sound; what is not set is up to the model's family."""

    fps: float | None = None
    """Frames per second of the video."""
    num_frames: int | None = None
    """Frames of the whole video, in place of `fps`."""
    max_frames: int | None = None
    """The most frames, whatever else is set."""
    overflow: Overflow = "refuse"
    """What becomes of a sound that is longer than the model hears at once."""
    use_audio: bool = False
    """Whether the sound of the video is heard with it."""


DEFAULT_SAMPLING = FrameSampling()


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True):
    """The run of tokens in the expanded prompt that belongs to one item."""

    offset: int
    length: int
    is_embed: bytes | None = None
    """A bit for each token, set where an embedding replaces the token; None for all tokens.

    The first token is the lowest bit of the first byte. Tokens that are not replaced are text, such
    as the ends of rows.
    """

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else len(self.embed_indexes())

    def embed_indexes(self) -> list[int]:
        """Return the indexes of the tokens that embeddings replace, counted from `offset`."""
        mask = b"\xff" * -(-self.length // 8) if self.is_embed is None else self.is_embed
        return [i for i in range(self.length) if mask[i // 8] >> i % 8 & 1]


class Placement(msgspec.Struct, frozen=True):
    """The tokens that take the place of an item's placeholder token, where they are no plain run.

    Embeddings replace those in `embed_ids`. The others are text, such as the times of frames.
    """

    token_ids: list[int]
    embed_ids: tuple[int, ...]
    marks: tuple[int, int] | None = None
    """Tokens before and behind the placeholder token that are replaced together with it."""

    def is_embed(self) -> bytes:
        """Return the mask of `PlaceholderRange` for these tokens."""
        mask = bytearray(-(-len(self.token_ids) // 8))
        for i, token_id in enumerate(self.token_ids):
            if token_id in self.embed_ids:
                mask[i // 8] |= 1 << i % 8
        return bytes(mask)


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """A large payload in a worker's memory; the key is the permission to read it."""

    worker: str
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    num_bytes: Annotated[int, Meta(ge=0)]


class MultiModalKwargsItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image, video or sound as the model takes it.

    Small tensors are in the same message: `fields` maps a field name to the index of its tensor in
    the envelope's tensor table. Large tensors are in a blob, itself an envelope whose head has the
    map.
    """

    modality: Annotated[str, since(3, VIDEO, AUDIO)]
    mm_hash: str
    placeholder: PlaceholderRange
    fields: dict[str, int] = {}
    blob: BlobRef | None = None
    embedding: str | None = None
    """Key of the embeddings that an encoder computes; `fields` are then only the metadata."""


_HASH = re.compile(r"[0-9a-f]{64}")


def is_hash(name: str) -> bool:
    """Return whether `name` has the form of a `content_hash`."""
    return _HASH.fullmatch(name) is not None


HashPart = str | bytes | memoryview | int | Sequence["HashPart"]


def content_hash(*parts: HashPart) -> str:
    """Return the SHA-256 over typed, length-framed parts as 64 hex digits.

    Every part carries its kind and its length, so no two different part lists have the same
    preimage: `("ab", "c")` and `("a", "bc")`, or `1` and `"1"`, differ.
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
    """Return the name of the embeddings that this model's tower makes of an item."""
    return content_hash("embedding", model, mm_hash)
