"""Encoded texts and files of separate stages: shared, never waited for in vain."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch
from shared.config.schema import BlobsConfig, Config, ModelConfig, StageConfig
from shared.errors import ConfigError, DecodeError, EncodingFailed
from shared.protocol import subjects
from shared.protocol.pipeline import LATENTS, TEXTS, Edge
from shared.protocol.task_messages import TaskHeader, TextsBody
from shared.stage import tasks
from shared.stage.inputs import RequestEnded
from shared.stage.runtime import Context
from shared.state import item_results
from tests.generator import painters
from tests.generator.painters import WatchedPainter
from tests.shared.stage.test_worker_loop import accept
from tests.support.waiting import until
from workers.generator.core.denoising import Condition, Pixels, Size
from workers.generator.image_items import (
    MAX_CLAIMED,
    MAX_LOSSES,
    LatentsWorker,
    StageFiles,
    StageTexts,
)
from workers.generator.image_loader import load_image_model
from workers.generator.image_parts import Caller
from workers.generator.image_thread import Encode, ImageThread
from workers.generator.text_store import TextStore, decode_texts, encode_texts

LATENT = from_torch(torch.ones(2, 3))


def text_of(num_values: int) -> Condition:
    prompt = torch.arange(num_values, dtype=torch.float32).to(torch.bfloat16)[None]
    arrays = {"prompt": from_torch(prompt), "pooled": from_torch(torch.ones(3))}
    return Condition(arrays, 1, ((64, 32),))


@contextlib.asynccontextmanager
async def store_of(bus: Bus) -> AsyncIterator[TextStore]:
    """A store in a worker with 1 MiB for blobs."""
    worker = f"generator-{secrets.token_hex(4)}"
    blobs = Blobs(bus, "generator", worker, BlobsConfig(arena_mib=1))
    await blobs.start()
    try:
        yield TextStore(bus, blobs, 60.0)
    finally:
        await blobs.close()


async def test_texts_wait_for_room_until_no_request_needs_them(bus: Bus) -> None:
    first, second = secrets.token_hex(32), secrets.token_hex(32)
    texts = [text_of(250_000), text_of(9)]
    async with store_of(bus) as store:
        assert await store.get(first) is None
        await store.put(first, texts, bus.now_ms() + 60_000)
        with pytest.raises(EncodingFailed, match="full of texts that were not read"):
            await store.put(second, [text_of(400_000)], bus.now_ms())
        with pytest.raises(EncodingFailed, match="larger than the memory"):
            await store.put(second, [text_of(600_000)], bus.now_ms() + 60_000)
        assert await store.get(first) == texts
        # Texts that were read make room for others.
        await store.put(second, [text_of(400_000)], bus.now_ms() + 2_000)
        assert await store.get(first) is None
        assert not await store.find_again(first)
        assert await store.find_again(second)


def test_a_blob_with_another_number_of_tensors_is_not_read() -> None:
    text = text_of(9)
    whole = b"".join(encode_texts([text]))
    assert decode_texts(whole) == [text]
    # Two names of tensors become three.
    changed = whole.replace(b"\x92\xa6prompt\xa6pooled", b"\x93\xa6prompt\xa2po\xa3led")
    with pytest.raises(DecodeError, match="another number of tensors"):
        decode_texts(changed)


async def caller_of(bus: Bus, model: str, name: str) -> Caller:
    request_id = f"{model}-{name}"
    ticket = await accept(bus, model, request_id)
    header = TaskHeader(request_id, model, "interactive", ticket, outputs=["image"])
    return Caller(header, "", 0.0, lambda: None)


async def tasks_of(bus: Bus, model: str, stage: str) -> list[StoredMessage]:
    where = subjects.stage_filter(stage, model, "interactive")
    return await bus.read(subjects.STAGES_STREAM, where)


async def test_requests_with_equal_texts_in_one_scope_share_a_task(bus: Bus, model: str) -> None:
    edge, texts = Edge("dit", "text_encoder", TEXTS, "item", "fan_out"), [text_of(9)]
    async with store_of(bus) as store:
        encoder = StageTexts(bus, edge, store, "weights")
        callers = [await caller_of(bus, model, name) for name in "abc"]
        # The third request has another scope, as the requests of another tenant have.
        encodes = [Encode(("a cat", ""), scope) for scope in ("x", "x", "y")]
        encoding = [
            asyncio.create_task(encoder.encode(caller, encode))
            for caller, encode in zip(callers, encodes, strict=True)
        ]

        async def published() -> list[StoredMessage] | None:
            stored = await tasks_of(bus, model, "text_encoder")
            return stored if len(stored) == 2 else None

        for message in await until(published, 20):
            task, _ = tasks.decode(message.data, TextsBody)
            await store.put(task.body.key, texts, bus.now_ms() + 2_000)
        assert await asyncio.gather(*encoding) == [texts] * 3
        # A later request finds the result.
        assert await encoder.encode(await caller_of(bus, model, "d"), encodes[0]) == texts
        assert len(await tasks_of(bus, model, "text_encoder")) == 2


async def test_a_result_that_is_lost_again_and_again_is_an_error(
    bus: Bus, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_results, "LOOK_S", 0.05)
    files = StageFiles(bus, Edge("dit", "vae", LATENTS, "item", "fan_out"))
    caller, removed = await caller_of(bus, model, "r"), set[int]()
    storing = asyncio.create_task(files.store(caller, 0, LATENT, (8, 8), None))
    # As if a worker removed the task, and died with the result.
    while not storing.done():
        for task in await tasks_of(bus, model, "vae"):
            removed.add(task.sequence)
            await bus.delete(subjects.STAGES_STREAM, task.sequence)
        await asyncio.sleep(0)
    with pytest.raises(EncodingFailed, match=f"of the stage vae were lost {MAX_LOSSES} times"):
        storing.result()
    assert len(removed) == MAX_LOSSES


async def test_a_request_that_has_ended_does_not_wait(bus: Bus, model: str) -> None:
    def check() -> None:
        raise RequestEnded

    files = StageFiles(bus, Edge("dit", "vae", LATENTS, "item", "fan_out"))
    caller = await caller_of(bus, model, "r")
    with pytest.raises(RequestEnded):
        await files.store(caller._replace(check=check), 0, LATENT, (8, 8), None)


class GatedDecoder(WatchedPainter):
    """A painter with a decoder that waits for `may_go_on`."""

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        assert self.may_go_on.acquire(timeout=20)
        return super().pixels(latents, size)


async def test_tasks_stay_in_the_queue_for_other_workers(bus: Bus, model: str) -> None:
    stages: dict[str, Any] = {
        "vae": {
            "role": "generator",
            "inputs": {"latents": {"from": "dit", "function": "item", "mode": "fan_out"}},
        }
    }
    config = Config(
        {model: ModelConfig("nowhere", stages=msgspec.convert(stages, dict[str, StageConfig]))}
    )
    name, log = f"generator-{secrets.token_hex(4)}", structlog.get_logger()
    context = Context("generator", name, model, config, bus, log, "vae")
    painter = GatedDecoder(gated=True)
    serving = asyncio.create_task(LatentsWorker(context, model, ImageThread(painter, 8)).serve())
    files = StageFiles(bus, Edge("dit", "vae", LATENTS, "item", "fan_out"))
    caller = await caller_of(bus, model, "r")
    latents = from_torch(torch.zeros(3, 16, 16, dtype=torch.float64))
    storing = [
        asyncio.create_task(files.store(caller, number, latents, (16, 16), None))
        for number in range(5)
    ]

    async def claimed() -> int:
        names = [task.subject.rpartition(".")[2] for task in await tasks_of(bus, model, "vae")]
        attempts = [
            await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(name)) for name in names
        ]
        return sum(map(bool, attempts))

    async def is_full() -> bool:
        return await claimed() >= MAX_CLAIMED

    await until(is_full)
    assert await claimed() == MAX_CLAIMED
    painter.may_go_on.release(5)
    urls = await asyncio.gather(*storing)
    assert len(set(urls)) == 1
    context.shutdown.begin()
    await serving
    await context.close()


def test_a_painter_without_parts_has_no_separate_stages(tmp_path: Path) -> None:
    painters.write(tmp_path / "painter")
    with pytest.raises(ConfigError, match="not a folder of diffusers") as caught:
        load_image_model(tmp_path / "painter", "float32", [], "the.key", work=[LATENTS])
    assert caught.value.field == "the.key"
