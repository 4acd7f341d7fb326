"""How pictures leave the renderer: in the message, beside it, or by way of an encoder."""

from collections.abc import Mapping, Sequence

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.config import Config
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.messages import EncodeTask, RenderTask
from shared.protocol.multimodal import (
    BlobRef,
    MultiModalKwargsItem,
    PlaceholderRange,
    embedding_key,
)
from workers.renderer.image_cache import PreparedImage, copy_tensor

# Of a message, for all that is not tensors.
HEAD_BYTES = 256 * 2**10


class Packer:
    def __init__(self, bus: Bus, blobs: Blobs, config: Config) -> None:
        self._bus = bus
        self._blobs = blobs
        self._config = config

    async def pack(
        self,
        task: RenderTask | None,
        prepared: Sequence[PreparedImage],
        ranges: Sequence[PlaceholderRange],
        made: list[BlobRef],
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """The items of an engine task and the tensors of its envelope. Without a `task` nobody will
        have them, and no encoder is asked. What is not the request's any more leaves `made`.

        Raises Overloaded or Unavailable when there is no room at present.
        """
        tensors: list[TensorData] = []
        items: list[MultiModalKwargsItem] = []
        inline = self._fit_inline([p for p in prepared if not self._goes_to_encoder(task, p)])
        for picture, placeholder in zip(prepared, ranges, strict=True):
            if task is not None and self._goes_to_encoder(task, picture):
                item = await self._send_to_encoder(task, picture, placeholder, tensors)
                _remove(made, picture)
            else:
                item = await self._item(picture, placeholder, tensors, inline=inline)
                if item.blob is None:
                    _remove(made, picture)
            items.append(item)
        self._check_room(prepared, tensors)
        return items, tensors

    def _goes_to_encoder(self, task: RenderTask | None, picture: PreparedImage) -> bool:
        if task is None:
            return False
        model = self._config.models[task.model]
        return model.tower == "encoder" and picture.num_tokens > model.local_tokens

    async def _send_to_encoder(
        self,
        task: RenderTask,
        picture: PreparedImage,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
    ) -> MultiModalKwargsItem:
        """Have the picture encoded, unless it is already or is about to be."""
        key = embedding_key(task.model, picture.mm_hash)
        needless = await self._is_encoded(key) or await self._is_queued(key, task, picture)
        if needless and picture.ref is not None:
            await self._blobs.release(picture.ref)
        indexes = _append(tensors, picture.metadata)
        return MultiModalKwargsItem(
            picture.modality, picture.mm_hash, placeholder, indexes, embedding=key
        )

    async def _is_encoded(self, key: str) -> bool:
        told = await self._bus.read_last(subjects.EMBEDDINGS_STREAM, subjects.embedding(key))
        # What is about to expire may be gone before the engine asks for it.
        good_ms = 1000 * self._config.embeddings.ttl_s / 2
        return told is not None and self._bus.now_ms() - told.stored_ms < good_ms

    async def _is_queued(self, key: str, task: RenderTask, picture: PreparedImage) -> bool:
        """Whether somebody else's task for the picture was there before ours, which is dropped."""
        if task.lane == "batch":
            # One that waits in the faster lane will do.
            name = subjects.encoding(key)
            faster = subjects.stage("encoder", task.model, "interactive", name)
            if await self._bus.read_last(subjects.STAGES_STREAM, faster) is not None:
                return True
        tensors: list[TensorData] = []
        whole = PlaceholderRange(0, picture.num_tokens)
        item = await self._item(picture, whole, tensors, inline=self._fit_inline([picture]))
        self._check_room([picture], tensors)
        encode = EncodeTask(key, task.model, item, task.accepted.deadline_ms)
        return await self._bus.publish(
            subjects.stage("encoder", task.model, task.lane, subjects.encoding(key)),
            envelope.encode(encode, tensors),
            f"{key}:{task.request_id}:{task.accepted.sequence}:{task.round}",
        )

    async def _item(
        self,
        picture: PreparedImage,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
        *,
        inline: bool,
    ) -> MultiModalKwargsItem:
        """The item with all its fields; those in the message are appended to `tensors`."""
        ref, fields = picture.ref, picture.fields
        if ref is not None and inline:
            fields = fields or await self._copy(ref)
            await self._blobs.release(ref)
            ref = None
        if ref is not None:
            return MultiModalKwargsItem(picture.modality, picture.mm_hash, placeholder, blob=ref)
        indexes = _append(tensors, fields)
        return MultiModalKwargsItem(picture.modality, picture.mm_hash, placeholder, indexes)

    def _fit_inline(self, prepared: Sequence[PreparedImage]) -> bool:
        num_bytes = sum(p.ref.num_bytes for p in prepared if p.ref is not None)
        return num_bytes <= self._config.blobs.inline_kib * 2**10

    def _check_room(self, prepared: Sequence[PreparedImage], tensors: Sequence[TensorData]) -> None:
        """What finds no room in the arena goes with the message.

        Raises Unavailable when that is too large, and there will be room once others have ended.
        """
        num_bytes = sum(tensor.data.nbytes for tensor in tensors)
        homeless = any(picture.ref is None for picture in prepared)
        too_large = num_bytes > self._bus.max_payload - HEAD_BYTES
        if homeless and too_large and num_bytes < self._blobs.capacity:
            raise Unavailable("there is no room for its pictures at present")

    async def _copy(self, ref: BlobRef) -> dict[str, TensorData]:
        with await self._blobs.get(ref) as blob:
            fields, _ = mm_items.read_item(blob)
            return {name: copy_tensor(tensor) for name, tensor in fields.items()}


def _remove(made: list[BlobRef], picture: PreparedImage) -> None:
    """Somebody else is to release it, or it is released."""
    if picture.ref is not None:
        made.remove(picture.ref)


def _append(tensors: list[TensorData], fields: Mapping[str, TensorData]) -> dict[str, int]:
    """By name, the indexes that the fields now have among `tensors`."""
    indexes = {name: len(tensors) + number for number, name in enumerate(fields)}
    tensors += fields.values()
    return indexes
