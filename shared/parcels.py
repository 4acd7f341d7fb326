"""Multimodal items between stages: small ones in the message, large ones as blobs beside it."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from shared import codec
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.errors import DecodeError
from shared.multimodal import BlobRef, MultiModalKwargsItem
from shared.roads import Blob


class Contents(Struct, frozen=True):
    """Head of an item's blob."""

    fields: dict[str, int]
    num_tokens: int
    """Length of the placeholder that it fills."""


def put(
    blobs: Blobs, mm_hash: str, num_tokens: int, fields: Mapping[str, TensorData], ttl_s: float
) -> BlobRef | None:
    """A blob of the item's tensors; None if there is no room for it."""
    contents = Contents({name: number for number, name in enumerate(fields)}, num_tokens)
    parts = codec.encode_parts(contents, list(fields.values()))
    return blobs.put(mm_hash, parts, ttl_s)


def num_bytes(fields: Mapping[str, TensorData]) -> int:
    """Of the tensors alone."""
    return sum(tensor.data.nbytes for tensor in fields.values())


def read(blob: Blob) -> tuple[dict[str, TensorData], int]:
    """Tensors by name, views into the blob, and the number of tokens. Raises DecodeError."""
    contents, tensors = codec.decode(blob.data, Contents)
    return _named(contents.fields, tensors), contents.num_tokens


async def open_item(
    blobs: Blobs, item: MultiModalKwargsItem, tensors: Sequence[TensorData]
) -> tuple[dict[str, TensorData], Blob | None]:
    """The item's tensors by name, views all of them, and the blob to be closed after their use.

    Raises BlobLost, or DecodeError for an item whose fields do not fit its tensors.
    """
    if item.blob is None:
        return _named(item.fields, tensors), None
    blob = await blobs.get(item.blob)
    try:
        fields, num_tokens = read(blob)
        if num_tokens != item.placeholder.length:
            raise DecodeError(
                f"an item of {num_tokens} tokens has a placeholder of {item.placeholder.length}"
            )
        return fields, blob
    except BaseException:
        blob.close()
        raise


def _named(fields: dict[str, int], tensors: Sequence[TensorData]) -> dict[str, TensorData]:
    if any(not 0 <= index < len(tensors) for index in fields.values()):
        raise DecodeError("an item names a tensor that its envelope does not have")
    return {name: tensors[index] for name, index in fields.items()}
