"""Embedding store: passes embeddings from their producer to consumers, by the hash of the item.

A producer stores embeddings in its memory or in a shared directory, and publishes their location in
the stream RESULTS. A consumer acknowledges embeddings that it has read, so that the memory can be
reused. The store is only a cache: lost embeddings are recomputed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from torch import Tensor

from shared.blobs.store import Blobs
from shared.blobs.transports import Blob
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.config.schema import Config
from shared.errors import BlobLost, ConfigError, DecodeError, EncodingFailed, Overloaded
from shared.protocol.multimodal import BlobRef, embedding_key
from shared.protocol.names import encode_model
from shared.protocol.task_messages import ItemResult
from shared.state import item_results
from shared.vision.embedding_directory import EmbeddingDirectory, Role

_log = structlog.get_logger()


class _Head(msgspec.Struct, frozen=True):
    """Head of a blob with one tensor."""


@dataclass(frozen=True, slots=True)
class Held:
    """Embeddings that a consumer reads: [num_tokens, width]."""

    embedding: Tensor
    mm_hash: str
    ref: BlobRef | None = None
    blob: Blob | None = None
    """Memory of the tensor, to be closed after its last use."""

    def close(self) -> None:
        if self.blob is not None:
            self.blob.close()


class EmbeddingStore:
    """Embeddings of one model, for a worker that produces or consumes them, or both."""

    def __init__(self, bus: Bus, blobs: Blobs, config: Config, model: str, role: Role) -> None:
        """Raises ConfigError for a directory that cannot be used in this role."""
        self._bus = bus
        self._blobs = blobs
        self._role = role
        self._model = model
        self._ttl_s = config.embeddings.ttl_s
        self._max_bytes = config.blobs.arena_mib * 2**20
        self._directory: EmbeddingDirectory | None = None
        if config.embeddings.storage == "directory":
            if config.embeddings.path is None:
                raise ConfigError("embeddings.path is not set", field="embeddings.path")
            folder = Path(config.embeddings.path) / encode_model(model)
            self._max_bytes = config.embeddings.max_mib * 2**20
            self._directory = EmbeddingDirectory(folder, role, self._max_bytes, self._ttl_s)

    @property
    def shared(self) -> bool:
        """Whether this worker shares its embeddings with others that have a tower."""
        return self._role == "both"

    def key_of(self, mm_hash: str) -> str:
        return embedding_key(self._model, mm_hash)

    # -- producer -----------------------------------------------------------------------------

    async def put(self, key: str, mm_hash: str, embedding: Tensor) -> None:
        """Store embeddings and publish their location.

        Raises Overloaded if there is no room now, and EncodingFailed if they are larger than the
        store.
        """
        assert self._role != "consumer"
        if embedding.nbytes > self._max_bytes:
            raise EncodingFailed("the embeddings of an item are larger than the store")
        blob = None
        if self._directory is not None:
            await asyncio.to_thread(self._directory.put, mm_hash, embedding)
        else:
            parts = envelope.encode_parts(_Head(), [from_torch(embedding)])
            blob = self._blobs.put(key, parts, self._ttl_s)
            if blob is None:
                raise Overloaded("the memory is full of embeddings that no engine has read yet")
        await item_results.publish(self._bus, key, ItemResult(blob))

    async def find_again(self, key: str, mm_hash: str) -> bool:
        """Return whether the embeddings are still stored. If so, their location is published."""
        assert self._role != "consumer"
        if self._directory is not None:
            if await asyncio.to_thread(self._directory.get, mm_hash) is None:
                return False
            await item_results.publish(self._bus, key, ItemResult())
            return True
        held = await self.get(key, mm_hash)
        if held is not None:
            held.close()
            return True
        blob = await self._blobs.find(key, self._ttl_s)
        if blob is not None:
            await item_results.publish(self._bus, key, ItemResult(blob))
        return blob is not None

    # -- consumer -----------------------------------------------------------------------------

    async def get(self, key: str, mm_hash: str) -> Held | None:
        """Return the embeddings; None if they are not stored yet, or are lost.

        The record of lost embeddings is deleted, so that no other consumer reads it.
        """
        stored = await item_results.last(self._bus, key)
        if stored is None:
            return None
        try:
            return await self._open(item_results.decode(stored.data), mm_hash)
        except (BlobLost, DecodeError) as error:
            _log.warning("embedding_lost", key=key, reason=error.message)
            await item_results.forget(self._bus, stored)
            return None

    async def wait(self, key: str, mm_hash: str, progress: Callable[[], Awaitable[None]]) -> Held:
        """Return the embeddings as soon as they are stored.

        `progress` is called repeatedly while an encode task exists. Raises BlobLost if there is no
        task, and the error of a failed encode task.
        """
        return await item_results.wait(self._bus, key, lambda: self.get(key, mm_hash), progress)

    async def acknowledge(self, held: Held) -> None:
        """Allow the producer to remove embeddings that have been read."""
        if held.ref is not None:
            await self._blobs.acknowledge(held.ref)
        elif self._directory is not None:
            await asyncio.to_thread(self._directory.acknowledge, held.mm_hash)

    async def _open(self, result: ItemResult, mm_hash: str) -> Held:
        ref = result.blob
        if ref is None:
            embedding = None
            if self._directory is not None:
                embedding = await asyncio.to_thread(self._directory.get, mm_hash)
            if embedding is None:
                raise BlobLost("the file of an item's embeddings is gone")
            return Held(embedding, mm_hash)
        blob = await self._blobs.get(ref)
        try:
            _, tensors = envelope.decode(blob.data, _Head)
            if len(tensors) != 1 or len(tensors[0].shape) != 2:
                raise DecodeError("the blob does not hold an item's embeddings")
            return Held(to_torch(tensors[0]), mm_hash, ref, blob)
        except BaseException:
            blob.close()
            raise
