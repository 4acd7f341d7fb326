"""How pictures leave the renderer: in the message, beside it, or by way of an encoder."""

from collections.abc import Mapping, Sequence

from shared import codec, parcels, subjects
from shared.blobs import Blobs
from shared.bus import Bus
from shared.codec import TensorData
from shared.config import Config
from shared.messages import EncodeTask, RenderTask
from shared.multimodal import (
    BlobRef,
    MultiModalKwargsItem,
    PlaceholderRange,
    embedding_key,
)
from workers.renderer.pictures import Prepared, copied


class Packer:
    def __init__(self, bus: Bus, blobs: Blobs, config: Config) -> None:
        self._bus = bus
        self._blobs = blobs
        self._config = config

    async def pack(
        self,
        task: RenderTask | None,
        prepared: Sequence[Prepared],
        ranges: Sequence[PlaceholderRange],
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """The items of an engine task and the tensors of its envelope. Without a `task` nobody will
        have them, and no encoder is asked.

        Raises Overloaded or Unavailable when the encoders' queue takes no more.
        """
        tensors: list[TensorData] = []
        items: list[MultiModalKwargsItem] = []
        stay = [p for p in prepared if not self._goes_to_encoder(task, p)]
        inline = self._fit_inline(stay)
        for picture, placeholder in zip(prepared, ranges, strict=True):
            if task is not None and self._goes_to_encoder(task, picture):
                item = await self._send_to_encoder(task, picture, placeholder, tensors)
            else:
                item = await self._item(picture, placeholder, tensors, inline)
            items.append(item)
        return items, tensors

    def _goes_to_encoder(self, task: RenderTask | None, picture: Prepared) -> bool:
        if task is None:
            return False
        model = self._config.models[task.model]
        return model.tower == "encoder" and picture.num_tokens > model.local_tokens

    async def _send_to_encoder(
        self,
        task: RenderTask,
        picture: Prepared,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
    ) -> MultiModalKwargsItem:
        """Have the picture encoded, unless it is already or is about to be."""
        key = embedding_key(task.model, picture.mm_hash)
        needless = await self._is_encoded(key) or await self._is_queued(key, task, picture)
        if needless and picture.ref is not None:
            await self._blobs.release(picture.ref)
        return MultiModalKwargsItem(
            "image",
            picture.mm_hash,
            placeholder,
            _append(tensors, picture.metadata),
            embedding=key,
        )

    async def _is_encoded(self, key: str) -> bool:
        told = await self._bus.last(subjects.EMBEDDINGS_STREAM, subjects.embedding(key))
        # What is about to expire may be gone before the engine asks for it.
        good_ms = 1000 * self._config.embeddings.ttl_s / 2
        return told is not None and self._bus.now_ms() - told.stored_ms < good_ms

    async def _is_queued(self, key: str, task: RenderTask, picture: Prepared) -> bool:
        """Whether somebody else's task for the picture was there before ours, which is dropped."""
        if task.lane == "batch":
            # One that waits in the faster lane will do.
            faster = subjects.stage("encoder", task.model, "interactive", key)
            if await self._bus.last(subjects.STAGES_STREAM, faster) is not None:
                return True
        tensors: list[TensorData] = []
        whole = PlaceholderRange(0, picture.num_tokens)
        inline = self._fit_inline([picture])
        item = await self._item(picture, whole, tensors, inline)
        encode = EncodeTask(key, task.model, item, task.accepted.deadline_ms)
        return await self._bus.publish(
            subjects.stage("encoder", task.model, task.lane, key),
            codec.encode(encode, tensors),
            f"{key}:{task.request_id}:{task.accepted.sequence}:{task.round}",
        )

    async def _item(
        self,
        picture: Prepared,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
        inline: bool,
    ) -> MultiModalKwargsItem:
        """The item with all its fields; those in the message are appended to `tensors`."""
        ref, fields = picture.ref, picture.fields
        if ref is not None and inline:
            fields = fields or await self._copy(ref)
            await self._blobs.release(ref)
            ref = None
        if ref is not None:
            return MultiModalKwargsItem("image", picture.mm_hash, placeholder, blob=ref)
        indexes = _append(tensors, fields)
        return MultiModalKwargsItem("image", picture.mm_hash, placeholder, indexes)

    def _fit_inline(self, prepared: Sequence[Prepared]) -> bool:
        num_bytes = sum(p.ref.num_bytes for p in prepared if p.ref is not None)
        return num_bytes <= self._config.blobs.inline_kib * 2**10

    async def _copy(self, ref: BlobRef) -> dict[str, TensorData]:
        with await self._blobs.get(ref) as blob:
            fields, _ = parcels.read(blob)
            return {name: copied(tensor) for name, tensor in fields.items()}


def _append(tensors: list[TensorData], fields: Mapping[str, TensorData]) -> dict[str, int]:
    """By name, the indexes that the fields now have among `tensors`."""
    indexes = {name: len(tensors) + number for number, name in enumerate(fields)}
    tensors += fields.values()
    return indexes
