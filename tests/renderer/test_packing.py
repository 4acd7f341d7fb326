"""Images leave the renderer inline, as blobs or through an encoder, and their owner changes."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.arrays import from_numpy
from shared.codec.envelope import TensorData
from shared.config.schema import BlobsConfig, Config, ModelConfig
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef, PlaceholderRange, embedding_key
from shared.protocol.task_messages import EncodeBody, RequestTicket, Task, TaskHeader
from workers.renderer.image_cache import PreparedImage
from workers.renderer.packing import Packer

TTL_S = 60.0


@pytest.fixture
async def blobs(bus: Bus) -> AsyncIterator[Blobs]:
    store = Blobs(bus, "renderer", f"test-{secrets.token_hex(4)}", BlobsConfig(arena_mib=8))
    await store.start()
    yield store
    await store.close()


def packer(bus: Bus, blobs: Blobs, model: str, **more: Any) -> Packer:
    models = {model: ModelConfig("nowhere", tower="encoder", **more)}
    return Packer(bus, blobs, Config(models, blobs=BlobsConfig(inline_kib=1)))


def header_of(bus: Bus, model: str, lane: str = "interactive") -> TaskHeader:
    ticket = RequestTicket(bus.now_ms(), bus.now_ms() + 1000 * TTL_S, 1, "receipt")
    return TaskHeader(f"r{secrets.token_hex(4)}", model, lane, ticket)


def prepared(blobs: Blobs, num_tokens: int, mm_hash: str = "") -> PreparedImage:
    """An image of 4 KiB."""
    mm_hash = mm_hash or secrets.token_hex(32)
    fields = {
        "pixels": from_numpy(np.zeros(4096, dtype=np.uint8)),
        "grid": from_numpy(np.array([1, 2, 3])),
    }
    ref = mm_items.put_item(blobs, mm_hash, num_tokens, fields, TTL_S)
    assert ref is not None
    return PreparedImage(mm_hash, num_tokens, ref, fields, {"grid": fields["grid"]})


def ranges_of(images: list[PreparedImage]) -> list[PlaceholderRange]:
    return [PlaceholderRange(100 * i, p.num_tokens) for i, p in enumerate(images)]


def refs_of(images: list[PreparedImage]) -> list[BlobRef]:
    return [p.ref for p in images if p.ref is not None]


async def queued(
    bus: Bus, model: str, image: PreparedImage, lane: str = "interactive"
) -> tuple[Task[EncodeBody], list[TensorData]] | None:
    name = subjects.item_task(embedding_key(model, image.mm_hash))
    subject = subjects.stage("encoder", model, lane, name)
    stored = await bus.read_last(subjects.STAGES_STREAM, subject)
    return None if stored is None else envelope.decode(stored.data, Task[EncodeBody])


async def test_large_images_go_to_encoders_and_small_ones_stay(
    bus: Bus, blobs: Blobs, model: str
) -> None:
    small, large = prepared(blobs, 9), prepared(blobs, 10)
    images = [small, large]
    refs = refs_of(images)
    items, tensors = await packer(bus, blobs, model, local_tokens=9).pack(
        header_of(bus, model), images, ranges_of(images), refs
    )
    stays, goes = items
    assert (stays.blob, stays.embedding) == (small.ref, None)
    assert goes.blob is None
    assert goes.embedding == embedding_key(model, large.mm_hash)
    # The engine gets only the metadata of an image that an encoder has.
    assert set(goes.fields) == {"grid"}
    assert len(tensors) == 1
    assert refs == [small.ref]
    assert await queued(bus, model, small) is None
    message = await queued(bus, model, large)
    assert message is not None
    task, _ = message
    assert task.body.item.blob == large.ref
    assert task.body.item.placeholder.length == 10


async def test_an_image_with_a_published_task_is_released(
    bus: Bus, blobs: Blobs, model: str
) -> None:
    pack = packer(bus, blobs, model).pack
    first = prepared(blobs, 10)
    refs = refs_of([first])
    await pack(header_of(bus, model), [first], ranges_of([first]), refs)
    assert refs == []
    for lane in ("interactive", "batch"):
        again = prepared(blobs, 10, first.mm_hash)
        refs = refs_of([again])
        items, _ = await pack(header_of(bus, model, lane), [again], ranges_of([again]), refs)
        assert items[0].embedding is not None
        assert refs == []
    assert await queued(bus, model, first, "batch") is None
    assert blobs.num_pinned == 1
    assert len(blobs._server._leases) == 1


async def test_no_task_is_published_for_an_encoded_image(
    bus: Bus, blobs: Blobs, model: str
) -> None:
    image = prepared(blobs, 10)
    key = embedding_key(model, image.mm_hash)
    await bus.publish_without_id(subjects.result(key), b"told")
    refs = refs_of([image])
    await packer(bus, blobs, model).pack(header_of(bus, model), [image], ranges_of([image]), refs)
    assert await queued(bus, model, image) is None
    assert blobs.num_pinned == 0


async def test_an_image_without_room_waits_for_room(bus: Bus, blobs: Blobs, model: str) -> None:
    """It would fit into the arena, but not into a message."""
    fields = {"pixels": from_numpy(np.zeros(bus.max_payload - 4096, dtype=np.uint8))}
    homeless = PreparedImage(secrets.token_hex(32), 10, None, fields, {})
    large = Blobs(bus, "renderer", "large", BlobsConfig(arena_mib=32))
    with pytest.raises(Unavailable):
        await packer(bus, large, model).pack(
            header_of(bus, model), [homeless], ranges_of([homeless]), []
        )
    assert await queued(bus, model, homeless) is None
    await large.close()
