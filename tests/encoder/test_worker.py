"""The encoder's worker: its tasks come again under one name, and what becomes of each."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from shared.bus.bus import Bus
from shared.codec import envelope
from shared.config.schema import BlobsConfig, Config, DeliveryConfig, ModelConfig
from shared.protocol import subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange, embedding_key
from shared.protocol.records import Failure
from shared.stage.runtime import Context
from shared.state.token_log import last_record
from shared.vision.embedding_store import EmbeddingStore
from tests.support.waiting import until
from tests.support.workers import Announcement
from tests.tasks import encode_task
from workers.encoder.worker import EncoderWorker

Start = Callable[..., Any]


class Tower:
    """In place of a `TowerThread`."""

    num_waiting = num_batches = 0
    batch_s = 0.0

    def __init__(self) -> None:
        self.num_encoded = 0
        self.memory_shortages = {"split": 0, "fail": 0}
        self.embedding = torch.ones(4, 8)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.lost = asyncio.Event()

    async def encode(self, fields: Any) -> Tensor:
        self.num_encoded += 1
        await self.go_on.wait()
        return self.embedding

    async def work(self) -> None:
        await self.lost.wait()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def close(self) -> None:
        pass


@dataclass
class Encoder:
    worker: str
    tower: Tower
    embeddings: EmbeddingStore
    stop: Callable[[], Awaitable[None]]
    serving: asyncio.Task[None]


@pytest.fixture
async def start(bus: Bus, model: str) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(arena_mib: int = 4) -> Encoder:
            config = Config(
                {model: ModelConfig("nowhere")},
                blobs=BlobsConfig(arena_mib=arena_mib),
                delivery=DeliveryConfig(ack_wait_s=3.0, retry_delay_s=0.1, drain_s=0.1),
            )
            worker = f"encoder-{secrets.token_hex(4)}"
            context = Context("encoder", worker, model, config, bus, structlog.get_logger())
            blobs = await context.open_blobs()
            embeddings = EmbeddingStore(bus, blobs, config, model, "producer")
            tower: Any = Tower()
            ready = asyncio.create_task(Announcement(context).wait())
            serving = asyncio.create_task(
                EncoderWorker(context, model, tower, blobs, embeddings).serve()
            )

            async def stop() -> None:
                if not serving.done():
                    context.shutdown.signal()
                    await serving
                await context.close()

            stack.push_async_callback(stop)
            await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ready.cancel()
                await serving
            return Encoder(worker, tower, embeddings, stop, serving)

        yield start


async def ask_for(
    bus: Bus, model: str, mm_hash: str, lane: str = "interactive", within_s: float = 60
) -> str:
    key = embedding_key(model, mm_hash)
    item = MultiModalKwargsItem("image", mm_hash, PlaceholderRange(0, 4))
    name, expires_ms = subjects.item_task(key), bus.now_ms() + 1000 * within_s
    task = encode_task(name, key, item, model=model, lane=lane, expires_ms=expires_ms)
    subject = subjects.stage("encoder", model, lane, name)
    await bus.publish(subject, envelope.encode(task, []), secrets.token_hex(8))
    return key


async def settled(bus: Bus, key: str) -> None:
    async def is_settled() -> bool:
        return (
            await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(subjects.item_task(key)))
            is None
        )

    await until(is_settled)


async def test_attempts_that_ended_well_are_not_held_against_the_image(
    start: Start, bus: Bus, model: str
) -> None:
    """The encoders of those attempts have been restarted since; the image did not kill them."""
    mm_hash = secrets.token_hex(32)
    for _ in range(2):
        encoder = await start()
        key = await ask_for(bus, model, mm_hash)
        await settled(bus, key)
        await encoder.stop()
        await bus.purge(subjects.WORKERS_STREAM, subjects.heartbeat(encoder.worker))
    # One more, which is delivered twice for some other reason.
    inbox = await bus.queues.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer("encoder", model, "interactive"),
        subjects.stage_filter("encoder", model, "interactive"),
        1,
        60,
    )
    await ask_for(bus, model, mm_hash)
    delivery = await asyncio.wait_for(inbox.next(), 5)
    await inbox.stop()
    await delivery.retry(0)
    encoder = await start()
    await settled(bus, key)
    assert await last_record(bus, subjects.item_task(key)) is None
    assert encoder.tower.num_encoded == 1


async def test_an_image_without_room_is_not_processed_again(
    start: Start, bus: Bus, model: str
) -> None:
    encoder = await start(arena_mib=1)
    encoder.tower.embedding = torch.zeros(600, 256)  # 0.6 MiB
    first, second = secrets.token_hex(32), secrets.token_hex(32)
    await settled(bus, await ask_for(bus, model, first))
    key = await ask_for(bus, model, second)
    await asyncio.sleep(1.5)
    assert await bus.read_last(subjects.RESULTS_STREAM, subjects.result(key)) is None
    held = await encoder.embeddings.get(embedding_key(model, first), first)
    await encoder.embeddings.acknowledge(held)
    held.close()
    await settled(bus, key)
    assert await bus.read_last(subjects.RESULTS_STREAM, subjects.result(key)) is not None
    assert encoder.tower.num_encoded == 2


async def test_an_embedding_that_never_fits_is_refused_at_once(
    start: Start, bus: Bus, model: str
) -> None:
    encoder = await start(arena_mib=1)
    encoder.tower.embedding = torch.zeros(1200, 256)  # 1.2 MiB
    key = await ask_for(bus, model, secrets.token_hex(32))
    await settled(bus, key)
    record = await last_record(bus, subjects.item_task(key))
    assert isinstance(record, Failure)
    assert record.error.code == "encoding_failed"


async def test_one_image_in_both_lanes_is_made_once_and_both_are_settled(
    start: Start, bus: Bus, model: str
) -> None:
    encoder = await start()
    encoder.tower.go_on.clear()
    mm_hash = secrets.token_hex(32)
    await ask_for(bus, model, mm_hash, "batch")
    await until(lambda: _is_true(encoder.tower.num_encoded == 1))
    key = await ask_for(bus, model, mm_hash, "interactive")
    await asyncio.sleep(0.2)
    encoder.tower.go_on.set()
    # Sooner than after an ack wait.
    async with asyncio.timeout(1.5):
        await settled(bus, key)
    assert encoder.tower.num_encoded == 1


async def _is_true(value: bool) -> bool:
    return value


async def test_a_lost_device_ends_the_encoder_and_counts_as_a_death_of_its_images(
    start: Start, bus: Bus, model: str
) -> None:
    encoder = await start()
    encoder.tower.go_on.clear()
    key = await ask_for(bus, model, secrets.token_hex(32))
    await until(lambda: _is_true(encoder.tower.num_encoded == 1))
    encoder.tower.lost.set()
    with pytest.raises(RuntimeError, match="CUDA error"):
        await asyncio.wait_for(encoder.serving, 5)
    attempts = subjects.attempts(subjects.item_task(key))
    records = [
        decode_attempt(each.data) for each in await bus.read(subjects.ATTEMPTS_STREAM, attempts)
    ]
    assert [r.outcome for r in records if isinstance(r, AttemptRecord)] == ["open"]
