"""Encoded texts as blobs, from the stage that encodes them to the stage that paints."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

from msgspec import Struct

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import BlobLost, DecodeError, EncodingFailed
from shared.protocol.task_messages import ItemResult
from shared.state import item_results
from workers.generator.core.denoising import Condition, Size

ROOM_PAUSE_S = 0.25
"""Interval of attempts to store texts while the memory is full of texts that were not read."""


class _Text(Struct, frozen=True):
    arrays: list[str]
    """Names of the text's tensors, which follow one another."""
    num_tokens: int
    image_sizes: list[Size]


class _Texts(Struct, frozen=True):
    texts: list[_Text]


class TextStore:
    """Encoded texts of a stage, in the memory of its workers.

    It is a cache. The record of lost texts is removed, and they are encoded again.
    """

    def __init__(self, bus: Bus, blobs: Blobs, ttl_s: float) -> None:
        self._bus, self._blobs, self._ttl_s = bus, blobs, ttl_s

    async def put(self, key: str, texts: Sequence[Condition], expires_ms: float) -> None:
        """Store texts, and publish their location. Waits for room until `expires_ms`.

        Raises EncodingFailed if the texts are larger than the memory, or there is no room.
        """
        parts = encode_texts(texts)
        if sum(text.num_bytes for text in texts) > self._blobs.capacity:
            raise EncodingFailed("the encoded texts are larger than the memory for blobs")
        while (blob := self._blobs.put(key, parts, self._ttl_s)) is None:
            if self._bus.now_ms() >= expires_ms:
                raise EncodingFailed("the memory for blobs is full of texts that were not read")
            await asyncio.sleep(ROOM_PAUSE_S)
        await item_results.publish(self._bus, key, ItemResult(blob))

    async def find_again(self, key: str) -> bool:
        """Return whether texts are still stored. If so, their location is published."""
        blob = await self._blobs.find(key, self._ttl_s)
        if blob is not None:
            await item_results.publish(self._bus, key, ItemResult(blob))
        return blob is not None

    async def get(self, key: str) -> list[Condition] | None:
        """Return texts; None if they are not stored yet, or are lost."""
        stored = await item_results.last(self._bus, key)
        if stored is None:
            return None
        try:
            ref = item_results.decode(stored.data).blob
            if ref is None:
                raise DecodeError("the result of texts is not a blob")
            blob = await self._blobs.get(ref)
            try:
                texts = decode_texts(bytes(blob.data))
            finally:
                blob.close()
        except (BlobLost, DecodeError):
            await item_results.forget(self._bus, stored)
            return None
        await self._blobs.acknowledge(ref)
        return texts


def encode_texts(texts: Sequence[Condition]) -> list[bytes | memoryview]:
    """Return the blob of texts in parts."""
    head = _Texts([_Text([*t.arrays], t.num_tokens, [*t.image_sizes]) for t in texts])
    tensors = list(itertools.chain.from_iterable(text.arrays.values() for text in texts))
    return envelope.encode_parts(head, tensors)


def decode_texts(data: bytes) -> list[Condition]:
    """Return the texts of a blob; their tensors are views into `data`. Raises DecodeError."""
    head, tensors = envelope.decode(data, _Texts)
    if len(tensors) != sum(len(text.arrays) for text in head.texts):
        raise DecodeError("a blob of texts has another number of tensors than its head")
    rest = iter(tensors)
    return [
        Condition(_named(text.arrays, rest), text.num_tokens, tuple(text.image_sizes))
        for text in head.texts
    ]


def _named(names: Sequence[str], tensors: Iterator[TensorData]) -> dict[str, TensorData]:
    return {name: next(tensors) for name in names}
