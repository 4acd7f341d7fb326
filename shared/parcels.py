"""Multimodal items between stages: small ones in the message, large ones as blobs beside it."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shared import codec
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.errors import DecodeError
from shared.multimodal import BlobRef, MultiModalKwargsItem
from shared.roads import Blob


class _Fields(Struct, frozen=True):
    """Head of an item's blob."""

    fields: dict[str, int]


def detach(
    blobs: Blobs,
    items: Sequence[MultiModalKwargsItem],
    tensors: Sequence[TensorData],
    ttl_s: float,
) -> list[MultiModalKwargsItem] | None:
    """The items without tensors in the message: each has a blob. None if there is no room.

    `tensors` are those of the whole message, to which the items' fields point.
    """
    refs: list[BlobRef] = []
    for item in items:
        fields = {name: number for number, name in enumerate(item.fields)}
        own = [tensors[index] for index in item.fields.values()]
        ref = blobs.put(item.mm_hash, codec.encode_parts(_Fields(fields), own), ttl_s)
        if ref is None:
            for earlier in refs:
                blobs.forget(earlier)
            return None
        refs.append(ref)
    return [replace(i, fields={}, blob=ref) for i, ref in zip(items, refs, strict=True)]


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
        head, own = codec.decode(blob.data, _Fields)
        return _named(head.fields, own), blob
    except BaseException:
        blob.close()
        raise


def _named(fields: dict[str, int], tensors: Sequence[TensorData]) -> dict[str, TensorData]:
    if any(not 0 <= index < len(tensors) for index in fields.values()):
        raise DecodeError("an item names a tensor that its envelope does not have")
    return {name: tensors[index] for name, index in fields.items()}
