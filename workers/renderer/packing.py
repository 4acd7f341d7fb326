"""Packing of processed items: into the message, into blobs, or into tasks for an encoder."""

from collections.abc import Mapping, Sequence

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.config.schema import Config
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.multimodal import (
    BlobRef,
    MultiModalKwargsItem,
    PlaceholderRange,
    embedding_key,
)
from shared.protocol.pipeline import Edge
from shared.protocol.task_messages import EncodeBody, TaskHeader
from shared.stage import tasks
from shared.stage.pipelines import pipelines_of
from shared.state import item_results
from workers.renderer.image_cache import PreparedImage, copy_tensor

# Room in a message for everything but tensors.
HEAD_BYTES = 256 * 2**10


class Packer:
    def __init__(self, bus: Bus, blobs: Blobs, config: Config) -> None:
        self._bus = bus
        self._blobs = blobs
        self._config = config
        self._pipelines = pipelines_of(config)

    async def pack(
        self,
        header: TaskHeader | None,
        prepared: Sequence[PreparedImage],
        ranges: Sequence[PlaceholderRange],
        refs: list[BlobRef],
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """Return the items of an engine's task and the tensors of its envelope.

        Without a `header` there is no request, and no task is published for encoders. References
        that the request need not release any more are removed from `refs`. Raises Overloaded or
        Unavailable when there is no room at present.
        """
        tensors: list[TensorData] = []
        items: list[MultiModalKwargsItem] = []
        edges = [None if header is None else self._fan_out(header, p) for p in prepared]
        inline = self._fit_inline(
            [p for p, edge in zip(prepared, edges, strict=True) if edge is None]
        )
        for image, placeholder, edge in zip(prepared, ranges, edges, strict=True):
            if header is not None and edge is not None:
                item = await self._fan_out_item(header, edge, image, placeholder, tensors)
                _remove(refs, image)
            else:
                item = await self._item(image, placeholder, tensors, inline=inline)
                if item.blob is None:
                    _remove(refs, image)
            items.append(item)
        self._check_room(prepared, tensors)
        return items, tensors

    def _fan_out(self, header: TaskHeader, image: PreparedImage) -> Edge | None:
        """Return the fan-out edge for an item; None for an item that goes to the engine."""
        if image.num_tokens <= self._config.models[header.model].local_tokens:
            return None
        edges = self._pipelines[header.model].edges
        carrying = (e for e in edges if e.mode == "fan_out" and e.carries == image.modality)
        return next(carrying, None)

    async def _fan_out_item(
        self,
        header: TaskHeader,
        edge: Edge,
        image: PreparedImage,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
    ) -> MultiModalKwargsItem:
        """Publish a task to encode the item, unless it is already encoded or queued."""
        key = embedding_key(header.model, image.mm_hash)
        needless = await self._is_encoded(key) or await self._is_queued(key, header, edge, image)
        if needless and image.ref is not None:
            await self._blobs.release(image.ref)
        indexes = _append(tensors, image.metadata)
        return MultiModalKwargsItem(
            image.modality, image.mm_hash, placeholder, indexes, embedding=key
        )

    async def _is_encoded(self, key: str) -> bool:
        result = await item_results.last(self._bus, key)
        # A result that is about to expire may be gone before the engine reads it.
        good_ms = 1000 * self._config.embeddings.ttl_s / 2
        return result is not None and self._bus.now_ms() - result.stored_ms < good_ms

    async def _is_queued(
        self, key: str, header: TaskHeader, edge: Edge, image: PreparedImage
    ) -> bool:
        """Publish the item's task, unless there is one already; return whether there was one."""
        if header.lane == "batch":
            # A task in the faster lane serves this request too.
            name = subjects.item_task(key)
            faster = subjects.stage(edge.target, header.model, "interactive", name)
            if await self._bus.read_last(subjects.STAGES_STREAM, faster) is not None:
                return True
        tensors: list[TensorData] = []
        whole = PlaceholderRange(0, image.num_tokens)
        item = await self._item(image, whole, tensors, inline=self._fit_inline([image]))
        self._check_room([image], tensors)
        body = EncodeBody(key, item)
        return await tasks.publish_item(self._bus, edge, header, key, body, tensors)

    async def _item(
        self,
        image: PreparedImage,
        placeholder: PlaceholderRange,
        tensors: list[TensorData],
        *,
        inline: bool,
    ) -> MultiModalKwargsItem:
        """Return the item with all its fields; inline fields are appended to `tensors`."""
        ref, fields = image.ref, image.fields
        if ref is not None and inline:
            fields = fields or await self._copy(ref)
            await self._blobs.release(ref)
            ref = None
        if ref is not None:
            return MultiModalKwargsItem(image.modality, image.mm_hash, placeholder, blob=ref)
        indexes = _append(tensors, fields)
        return MultiModalKwargsItem(image.modality, image.mm_hash, placeholder, indexes)

    def _fit_inline(self, prepared: Sequence[PreparedImage]) -> bool:
        num_bytes = sum(p.ref.num_bytes for p in prepared if p.ref is not None)
        return num_bytes <= self._config.blobs.inline_kib * 2**10

    def _check_room(self, prepared: Sequence[PreparedImage], tensors: Sequence[TensorData]) -> None:
        """Check that items without room in the arena fit into the message.

        Raises Unavailable if they do not fit, but will fit into the arena when other requests have
        ended.
        """
        num_bytes = sum(tensor.data.nbytes for tensor in tensors)
        without_room = any(image.ref is None for image in prepared)
        too_large = num_bytes > self._bus.max_payload - HEAD_BYTES
        if without_room and too_large and num_bytes < self._blobs.capacity:
            raise Unavailable("the media of this request have no room in the arena at present")

    async def _copy(self, ref: BlobRef) -> dict[str, TensorData]:
        with await self._blobs.get(ref) as blob:
            fields, _ = mm_items.read_item(blob)
            return {name: copy_tensor(tensor) for name, tensor in fields.items()}


def _remove(refs: list[BlobRef], image: PreparedImage) -> None:
    """Remove an image's reference, because its payload has been released or belongs to a task."""
    if image.ref is not None:
        refs.remove(image.ref)


def _append(tensors: list[TensorData], fields: Mapping[str, TensorData]) -> dict[str, int]:
    """Append the fields to `tensors`, and return the index of each by name."""
    indexes = {name: len(tensors) + number for number, name in enumerate(fields)}
    tensors += fields.values()
    return indexes
