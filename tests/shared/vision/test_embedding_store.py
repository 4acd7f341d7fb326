"""Embeddings between workers: shared, computed again when lost, never waited for in vain."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig, Config, EmbeddingsConfig, ModelConfig
from shared.errors import (
    BlobLost,
    EncodingFailed,
    InvalidRequest,
    NumberOverflow,
    Overloaded,
    Poisoned,
    UnsupportedContent,
    WorkerFailure,
)
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.multimodal import embedding_key
from shared.state.token_log import end_request
from shared.vision.embedding_directory import Role
from shared.vision.embedding_store import EmbeddingStore

MODEL = "demo"
MIB = 2**20
Start = Callable[..., Any]


def new_hash() -> str:
    return secrets.token_hex(32)


def key_of(mm_hash: str) -> str:
    return embedding_key(MODEL, mm_hash)


async def no_progress() -> None:
    pytest.fail("no encode task exists")


@pytest.fixture
async def start(bus: Bus) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            role: Role, arena_mib: int = 4, **more: Any
        ) -> tuple[EmbeddingStore, Blobs]:
            config = Config(
                {MODEL: ModelConfig("nowhere")},
                blobs=BlobsConfig(arena_mib=arena_mib),
                embeddings=EmbeddingsConfig(**more),
            )
            worker = f"test-{secrets.token_hex(4)}"
            blobs = Blobs(bus, role, worker, config.blobs)
            await blobs.start()
            stack.push_async_callback(blobs.close)
            beat = Heartbeat(role, worker, "0", 0, [], {}, blobs.address)
            await bus.heartbeats.publish(worker, to_json(beat))
            return EmbeddingStore(bus, blobs, config, MODEL, role), blobs

        yield start


async def test_an_embedding_of_one_worker_reaches_another(start: Start) -> None:
    producer, _ = await start("producer")
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    assert await consumer.get(key_of(mm_hash), mm_hash) is None
    tensor = torch.randn(9, 192).to(torch.bfloat16)
    await producer.put(key_of(mm_hash), mm_hash, tensor)
    held = await consumer.wait(key_of(mm_hash), mm_hash, no_progress)
    assert torch.equal(held.embedding, tensor)
    held.close()


async def test_a_waiter_is_woken(start: Start, bus: Bus) -> None:
    producer, _ = await start("producer")
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    task = subjects.stage("encoder", MODEL, "interactive", subjects.item_task(key_of(mm_hash)))
    await bus.publish(task, b"a task", secrets.token_hex(8))
    published = asyncio.Event()

    async def progress() -> None:
        published.set()

    waiting = asyncio.create_task(consumer.wait(key_of(mm_hash), mm_hash, progress))
    await published.wait()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    held = await waiting
    assert held.embedding.sum() == 8
    held.close()
    await bus.purge(subjects.STAGES_STREAM, task)


async def test_waiting_ends_when_no_encode_task_exists(start: Start) -> None:
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    with pytest.raises(BlobLost):
        await consumer.wait(key_of(mm_hash), mm_hash, no_progress)


async def test_an_embedding_lost_with_its_owner_is_forgotten(start: Start, bus: Bus) -> None:
    producer, blobs = await start("producer")
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    await blobs.close()
    with pytest.raises(BlobLost):
        await consumer.wait(key_of(mm_hash), mm_hash, no_progress)
    record = await bus.read_last(subjects.RESULTS_STREAM, subjects.result(key_of(mm_hash)))
    assert record is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnsupportedContent("no such picture", field="items"), InvalidRequest),
        (Poisoned("two workers died"), Poisoned),
        (NumberOverflow("not finite"), NumberOverflow),
        (WorkerFailure("it failed five times"), EncodingFailed),
    ],
)
async def test_a_waiter_gets_the_error_of_the_encoder(
    start: Start, bus: Bus, error: Any, expected: type[Exception]
) -> None:
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    await end_request(bus, subjects.item_task(key_of(mm_hash)), 1, error, [])
    with pytest.raises(expected, match=error.message):
        await consumer.wait(key_of(mm_hash), mm_hash, no_progress)


async def test_unread_embeddings_stay_and_read_ones_make_room(start: Start) -> None:
    producer, _ = await start("producer", arena_mib=1)
    consumer, _ = await start("consumer")
    first, second = new_hash(), new_hash()
    large = torch.zeros(600, 256)  # 0.6 MiB
    await producer.put(key_of(first), first, large)
    with pytest.raises(Overloaded):
        await producer.put(key_of(second), second, large)
    held = await consumer.get(key_of(first), first)
    await consumer.acknowledge(held)
    # A reader still holds it.
    with pytest.raises(Overloaded):
        await producer.put(key_of(second), second, large)
    held.close()
    for _ in range(200):
        with contextlib.suppress(Overloaded):
            await producer.put(key_of(second), second, large)
            break
        await asyncio.sleep(0.01)
    assert await consumer.get(key_of(first), first) is None
    held = await consumer.get(key_of(second), second)
    assert held is not None
    held.close()


async def test_a_fetched_embedding_stays_while_there_is_room(start: Start) -> None:
    producer, _ = await start("producer")
    mm_hash = new_hash()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    for _ in range(3):
        consumer, _ = await start("consumer")
        held = await consumer.wait(key_of(mm_hash), mm_hash, no_progress)
        await consumer.acknowledge(held)
        held.close()


async def test_after_its_time_it_is_gone(start: Start) -> None:
    producer, _ = await start("producer", ttl_s=0.05)
    consumer, _ = await start("consumer")
    mm_hash = new_hash()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    await asyncio.sleep(0.1)
    assert await consumer.get(key_of(mm_hash), mm_hash) is None


async def test_an_encoder_finds_what_its_neighbour_has_made(start: Start, bus: Bus) -> None:
    """Also when the broker has forgotten where it is."""
    producer, _ = await start("producer")
    neighbour, _ = await start("producer")
    mm_hash = new_hash()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    assert await neighbour.find_again(key_of(mm_hash), mm_hash)
    await bus.purge(subjects.RESULTS_STREAM, subjects.result(key_of(mm_hash)))
    assert await neighbour.find_again(key_of(mm_hash), mm_hash)
    consumer, _ = await start("consumer")
    held = await consumer.wait(key_of(mm_hash), mm_hash, no_progress)
    held.close()
    assert not await neighbour.find_again(key_of(new_hash()), new_hash())


async def test_a_directory_does_the_same(start: Start, tmp_path: Path, bus: Bus) -> None:
    files = {"storage": "directory", "path": str(tmp_path)}
    producer, _ = await start("producer", **files)
    consumer, _ = await start("consumer", **files)
    mm_hash = new_hash()
    await producer.put(key_of(mm_hash), mm_hash, torch.ones(2, 4))
    held = await consumer.wait(key_of(mm_hash), mm_hash, no_progress)
    assert torch.equal(held.embedding, torch.ones(2, 4))
    await consumer.acknowledge(held)
    assert (tmp_path / MODEL / mm_hash / "acknowledged").exists()
    await bus.purge(subjects.RESULTS_STREAM, subjects.result(key_of(mm_hash)))
    assert await producer.find_again(key_of(mm_hash), mm_hash)
    held = await consumer.get(key_of(mm_hash), mm_hash)
    assert held is not None


async def test_bytes_that_are_no_embeddings_are_a_miss(start: Start, bus: Bus) -> None:
    _, blobs = await start("producer")
    mm_hash = new_hash()
    ref = blobs.put(key_of(mm_hash), [b"no envelope at all"], 60)
    record = msgspec.msgpack.encode({"blob": ref})
    await bus.publish_without_id(subjects.result(key_of(mm_hash)), record)
    consumer, _ = await start("consumer")
    assert await consumer.get(key_of(mm_hash), mm_hash) is None
