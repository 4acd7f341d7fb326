"""An image is decoded and processed once per machine, with one result for all requests."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig, ModelConfig, RendererConfig
from shared.errors import InvalidMedia
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.multimodal import IMAGE
from tests.renderer.threads import in_thread
from tests.support.media import png
from workers.renderer.image_cache import ImageCache, PreparedImage
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.processing.processor import Processor
from workers.renderer.processing.prompt import MediaPart
from workers.settings import DEMO_MODEL

PART = MediaPart(IMAGE, "messages[0].content[0].image_url.url", "")


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(ModelConfig(str(Path(DEMO_MODEL))))


Start = Callable[..., Awaitable[tuple[ImageCache, Blobs]]]


@pytest.fixture
async def renderer(bus: Bus, processor: Processor) -> AsyncIterator[Start]:
    """Starts the image cache of a new renderer."""
    role = f"renderer-{secrets.token_hex(4)}"
    started: list[Blobs] = []

    async def start(arena_mib: int = 16) -> tuple[ImageCache, Blobs]:
        worker = f"{role}-{len(started)}"
        blobs = Blobs(bus, role, worker, BlobsConfig(arena_mib=arena_mib))
        await blobs.start()
        started.append(blobs)
        beat = Heartbeat(role, worker, "0", 0, [], {}, blobs.address)
        await bus.heartbeats.publish(worker, to_json(beat))
        return ImageCache(blobs, MediaDecoders(RendererConfig(), in_thread), in_thread), blobs

    yield start
    for blobs in started:
        await blobs.close()


async def contents(blobs: Blobs, prepared: PreparedImage) -> dict[str, bytes]:
    assert prepared.ref is not None
    with await blobs.get(prepared.ref) as blob:
        fields, num_tokens = mm_items.read_item(blob)
        assert num_tokens == prepared.num_tokens
        return {name: bytes(tensor.data) for name, tensor in fields.items()}


async def test_an_image_that_comes_again_is_not_made_again(
    renderer: Start, processor: Processor
) -> None:
    images, blobs = await renderer()
    first = await images.prepare(processor, PART, png(), "", 60)
    second = await images.prepare(processor, PART, png(), "", 60)
    other = await images.prepare(processor, PART, png(1), "", 60)
    assert (images.counters.processed, images.counters.hits) == (2, 1)
    assert first.mm_hash == second.mm_hash != other.mm_hash
    assert await contents(blobs, first) == await contents(blobs, second)
    assert await contents(blobs, first) != await contents(blobs, other)


async def test_another_renderer_of_the_machine_has_it_too(
    renderer: Start, processor: Processor
) -> None:
    (ours, our_blobs), (theirs, their_blobs) = await renderer(), await renderer()
    our_image = await ours.prepare(processor, PART, png(), "", 60)
    their_image = await theirs.prepare(processor, PART, png(), "", 60)
    assert (theirs.counters.processed, theirs.counters.hits) == (0, 1)
    assert their_image.ref is not None
    assert our_image.ref is not None
    assert their_image.ref.worker == our_image.ref.worker
    assert await contents(their_blobs, their_image) == await contents(our_blobs, our_image)
    await our_blobs.close()
    assert (await theirs.prepare(processor, PART, png(), "", 60)).ref is not None
    assert theirs.counters.processed == 1, "it is processed again once no renderer has it"


async def test_simultaneous_requests_wait_for_the_first(
    renderer: Start, processor: Processor
) -> None:
    images, blobs = await renderer()
    waiting = [
        asyncio.create_task(images.prepare(processor, PART, png(), "", 60)) for _ in range(8)
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    prepared = await asyncio.gather(*waiting, return_exceptions=True)
    assert images.counters.processed == 1
    assert isinstance(prepared[0], asyncio.CancelledError)
    copies = [await contents(blobs, p) for p in prepared[1:] if isinstance(p, PreparedImage)]
    assert len(copies) == 7
    assert all(image == copies[0] for image in copies)


async def test_a_bad_image_fails_for_each_by_its_own_field(
    renderer: Start, processor: Processor
) -> None:
    images, _ = await renderer()
    bad = b"\x89PNG broken"
    failed = await asyncio.gather(
        *(
            images.prepare(processor, MediaPart(IMAGE, f"field {i}", ""), bad, "", 60)
            for i in range(3)
        ),
        return_exceptions=True,
    )
    assert [type(error) for error in failed] == [InvalidMedia] * 3
    assert [error.field for error in failed if isinstance(error, InvalidMedia)] == [
        "field 0",
        "field 1",
        "field 2",
    ]


async def test_a_bad_image_of_a_cancelled_request_leaves_no_error(
    renderer: Start, processor: Processor
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    runs, goes_on, failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def refuse(*_: object) -> Any:
        runs.set()
        await goes_on.wait()
        failed.set()
        raise InvalidMedia("no image", field="")

    _, blobs = await renderer()
    images = ImageCache(blobs, MediaDecoders(RendererConfig(), cast(Any, refuse)), in_thread)
    preparing = asyncio.create_task(images.prepare(processor, PART, png(), "", 60))
    await runs.wait()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    goes_on.set()
    await failed.wait()
    del preparing
    for _ in range(10):  # More turns of the loop than the task needs to end.
        await asyncio.sleep(0)
    gc.collect()
    assert not errors


async def test_without_room_it_goes_into_the_message(renderer: Start, processor: Processor) -> None:
    images, blobs = await renderer(arena_mib=1)
    filling = blobs.put("ab" * 32, [bytes(2**20)], 60)
    assert filling is not None
    prepared = await images.prepare(processor, PART, png(), "", 60)
    assert prepared.ref is None
    assert set(prepared.fields) == {"pixel_patches", "pixel_table", "image_grid_thw"}
    await blobs.release(filling)
    assert (await images.prepare(processor, PART, png(), "", 60)).ref is not None


async def test_images_of_one_tenant_are_not_found_for_another(
    renderer: Start, processor: Processor
) -> None:
    (ours, _), (theirs, _) = await renderer(), await renderer()
    a = await ours.prepare(processor, PART, png(), "a", 60)
    b = await theirs.prepare(processor, PART, png(), "b", 60)
    assert a.mm_hash != b.mm_hash
    assert (theirs.counters.processed, theirs.counters.hits) == (1, 0)
    assert (await theirs.prepare(processor, PART, png(), "a", 60)).mm_hash == a.mm_hash
    assert (theirs.counters.processed, theirs.counters.hits) == (1, 1)
