"""Multimodal items between stages: small ones in the message, large ones as blobs."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from shared.blobs.store import Blobs
from shared.blobs.transports import Blob
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import DecodeError
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem


class ItemContents(Struct, frozen=True):
    """Header of an item's blob."""

    fields: dict[str, int]
    """Tensor index by field name."""
    num_tokens: int
    """Number of embeddings that replace placeholder tokens."""


def put_item(
    blobs: Blobs, mm_hash: str, num_tokens: int, fields: Mapping[str, TensorData], ttl_s: float
) -> BlobRef | None:
    """Store the item's tensors as a blob. Return None if there is no room."""
    contents = ItemContents({name: number for number, name in enumerate(fields)}, num_tokens)
    parts = envelope.encode_parts(contents, list(fields.values()))
    return blobs.put(mm_hash, parts, ttl_s)


def read_item(blob: Blob) -> tuple[dict[str, TensorData], int]:
    """Return the tensors by name, as views into the blob, and the number of tokens.

    Raises DecodeError.
    """
    contents, tensors = envelope.decode(blob.data, ItemContents)
    return select_tensors(contents.fields, tensors), contents.num_tokens


async def open_item(
    blobs: Blobs, item: MultiModalKwargsItem, tensors: Sequence[TensorData]
) -> tuple[dict[str, TensorData], Blob | None]:
    """Return the item's tensors by name, all of them views, and the blob to close after use.

    Raises BlobLost, or DecodeError for an item whose fields do not fit its tensors.
    """
    if item.blob is None:
        return select_tensors(item.fields, tensors), None
    blob = await blobs.get(item.blob)
    try:
        fields, num_tokens = read_item(blob)
        if num_tokens != item.placeholder.num_embeds:
            raise DecodeError(
                f"an item of {num_tokens} tokens has a placeholder of {item.placeholder.num_embeds}"
            )
        return fields, blob
    except BaseException:
        blob.close()
        raise


def select_tensors(fields: dict[str, int], tensors: Sequence[TensorData]) -> dict[str, TensorData]:
    """Return the tensors of a message by field name. Raises DecodeError for a missing index."""
    if any(not 0 <= index < len(tensors) for index in fields.values()):
        raise DecodeError("an item refers to a tensor that its envelope does not contain")
    return {name: tensors[index] for name, index in fields.items()}
