"""Embeddings between those who make them and those who need them, by the hash of their picture.

A producer keeps them, in its memory or in a directory that all share, and says where in stream
EMBEDDINGS. A consumer who has had them tells, so that the memory may be used for something else.
Whatever is lost on the way is made again: nothing here is more than a cache.
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
from shared.bus.stored import StoredMessage
from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.config import Config
from shared.errors import (
    BlobLost,
    ConfigError,
    DecodeError,
    EncodingFailed,
    InvalidRequest,
    Overloaded,
    PagemillError,
    Poisoned,
)
from shared.protocol import subjects
from shared.protocol.messages import EmbeddingRecord, ErrorInfo, Failure, to_msgpack
from shared.protocol.multimodal import BlobRef, embedding_key
from shared.state.token_log import last_record
from shared.vision.embedding_directory import EmbeddingDirectory, Role

# How often somebody who waits looks whether there is still something to wait for.
LOOK_S = 1.0

_log = structlog.get_logger()
_record = msgspec.msgpack.Decoder(EmbeddingRecord)


class _Head(msgspec.Struct, frozen=True):
    """Of a blob with one tensor."""


@dataclass(frozen=True, slots=True)
class Held:
    """Embeddings under the reader's eyes: [num_tokens, width]."""

    embedding: Tensor
    mm_hash: str
    ref: BlobRef | None = None
    blob: Blob | None = None
    """To be closed when nobody looks at the tensor any more."""

    def close(self) -> None:
        if self.blob is not None:
            self.blob.close()


class EmbeddingStore:
    """One model's, as one worker has them: a producer, a consumer, or both."""

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
            folder = Path(config.embeddings.path) / model
            self._max_bytes = config.embeddings.max_mib * 2**20
            self._directory = EmbeddingDirectory(folder, role, self._max_bytes, self._ttl_s)

    @property
    def shared(self) -> bool:
        """Whether those who make embeddings here also look for those of others."""
        return self._role == "both"

    def key_of(self, mm_hash: str) -> str:
        return embedding_key(self._model, mm_hash)

    # -- producer -----------------------------------------------------------------------------

    async def put(self, key: str, mm_hash: str, embedding: Tensor) -> None:
        """Keep them, and tell where.

        Raises Overloaded when there is no room for them, EncodingFailed when there never will be.
        """
        assert self._role != "consumer"
        if embedding.nbytes > self._max_bytes:
            raise EncodingFailed("the embeddings of a picture are larger than all room for them")
        blob = None
        if self._directory is not None:
            await asyncio.to_thread(self._directory.put, mm_hash, embedding)
        else:
            parts = envelope.encode_parts(_Head(), [from_torch(embedding)])
            blob = self._blobs.put(key, parts, self._ttl_s)
            if blob is None:
                raise Overloaded("embeddings that nobody has fetched yet take all of the memory")
        await self._tell(key, EmbeddingRecord(blob))

    async def find_again(self, key: str, mm_hash: str) -> bool:
        """Whether they have been made before and can still be had; whoever waits is then told."""
        assert self._role != "consumer"
        if self._directory is not None:
            if await asyncio.to_thread(self._directory.get, mm_hash) is None:
                return False
            await self._tell(key, EmbeddingRecord(None))
            return True
        held = await self.get(key, mm_hash)
        if held is not None:
            held.close()
            return True
        blob = await self._blobs.find(key, self._ttl_s)
        if blob is not None:
            await self._tell(key, EmbeddingRecord(blob))
        return blob is not None

    async def _tell(self, key: str, record: EmbeddingRecord) -> None:
        await self._bus.publish_without_id(subjects.embedding(key), to_msgpack(record))

    # -- consumer -----------------------------------------------------------------------------

    async def get(self, key: str, mm_hash: str) -> Held | None:
        """None if they are not made yet, or lost; then nobody else will look for them there."""
        told = await self._bus.read_last(subjects.EMBEDDINGS_STREAM, subjects.embedding(key))
        if told is None:
            return None
        try:
            return await self._open(told, mm_hash)
        except (BlobLost, DecodeError) as error:
            _log.warning("embedding_lost", key=key, reason=error.message)
            await self._bus.delete(subjects.EMBEDDINGS_STREAM, told.sequence)
            return None

    async def wait(self, key: str, mm_hash: str, progress: Callable[[], Awaitable[None]]) -> Held:
        """The embeddings, as soon as they are there. `progress` is called as long as somebody is
        about to make them.

        Raises BlobLost when nobody is, and whatever has kept an encoder from making them.
        """
        if (held := await self.get(key, mm_hash)) is not None:
            return held
        encoding = subjects.encoding(key)
        listener = await self._bus.subscribe(subjects.embedding(key))
        try:
            while True:
                # In this order: a task is gone only after its result has been told.
                task = await self._bus.read_last(
                    subjects.STAGES_STREAM, subjects.stages_of(encoding)
                )
                if (held := await self.get(key, mm_hash)) is not None:
                    return held
                if task is None:
                    await self._raise_failure(key)
                    raise BlobLost("a picture's embeddings are lost, and nobody makes them")
                await progress()
                await listener.next(LOOK_S)
        finally:
            await self._bus.unsubscribe(listener)

    async def acknowledge(self, held: Held) -> None:
        """They have been had, and may go when their owner needs the room."""
        if held.ref is not None:
            await self._blobs.acknowledge(held.ref)
        elif self._directory is not None:
            await asyncio.to_thread(self._directory.acknowledge, held.mm_hash)

    async def _open(self, told: StoredMessage, mm_hash: str) -> Held:
        ref = _record.decode(told.data).blob
        if ref is None:
            found = None
            if self._directory is not None:
                found = await asyncio.to_thread(self._directory.get, mm_hash)
            if found is None:
                raise BlobLost("the file of a picture's embeddings is gone")
            return Held(found, mm_hash)
        blob = await self._blobs.get(ref)
        try:
            _, tensors = envelope.decode(blob.data, _Head)
            if len(tensors) != 1 or len(tensors[0].shape) != 2:
                raise DecodeError("what should be a picture's embeddings is something else")
            return Held(to_torch(tensors[0]), mm_hash, ref, blob)
        except BaseException:
            blob.close()
            raise

    async def _raise_failure(self, key: str) -> None:
        """An encode task that has failed leaves its error where a request leaves its answer."""
        record = await last_record(self._bus, subjects.encoding(key))
        if isinstance(record, Failure):
            raise _as_error(record.error)


def _as_error(info: ErrorInfo) -> PagemillError:
    if info.fault == "client":
        return InvalidRequest(info.message, field=info.field)
    if info.code == Poisoned.code:
        return Poisoned(info.message)
    return EncodingFailed("the embeddings of a picture could not be made")
