"""A generator of any stage ends when its device is lost, and gives its requests no answer."""

import asyncio
import secrets
from typing import Any

import msgspec
import pytest
import structlog
import torch

from shared.bus.bus import Bus
from shared.codec.tensors import from_torch
from shared.config.schema import BlobsConfig, Config, ModelConfig, StageConfig
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.pipeline import LATENTS, TEXTS, Edge
from shared.stage.runtime import Context
from tests.generator import test_image_worker, test_speech_worker
from tests.generator.painters import WatchedPainter
from tests.generator.test_image_items import caller_of
from tests.generator.test_image_worker import REQUESTS, publish_request
from tests.generator.test_speech_worker import spoken
from tests.generator.test_vocoder_thread import CountingVocoder
from workers.generator.image_items import LatentsWorker, StageFiles, StageTexts, TextWorker
from workers.generator.image_thread import Encode, ImageThread
from workers.generator.image_worker import ImageWorker
from workers.generator.speech_worker import SpeechWorker
from workers.generator.text_store import TextStore
from workers.generator.vocoder_thread import VocoderThread
from workers.generator.worker import GeneratorWorker

ITEM_STAGES: dict[str, dict[str, Any]] = {
    stage: {
        "role": "generator",
        "inputs": {kind: {"from": "dit", "function": "item", "mode": "fan_out"}},
    }
    for stage, kind in (("text_encoder", TEXTS), ("vae", LATENTS))
}
STAGES = {
    "dit": test_image_worker.STAGES | ITEM_STAGES,
    "code2wav": test_speech_worker.STAGES,
}


def lose_device(*values: object) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def make_painter(*parts: str) -> WatchedPainter:
    painter = WatchedPainter()
    for part in parts:
        setattr(painter, part, lose_device)
    return painter


def make_context(bus: Bus, model: str, stage: str) -> Context:
    stages = STAGES.get(stage, STAGES["dit"])
    config = Config(
        {model: ModelConfig("nowhere", stages=msgspec.convert(stages, dict[str, StageConfig]))},
        blobs=BlobsConfig(arena_mib=1),
    )
    name, log = f"generator-{secrets.token_hex(4)}", structlog.get_logger()
    return Context("generator", name, model, config, bus, log, stage)


def make_worker(context: Context, model: str, part: str, store: TextStore) -> GeneratorWorker:
    stage = context.stage.name
    if stage == "code2wav":
        vocoder = CountingVocoder()
        setattr(vocoder, part, lose_device)
        chunks = ChunkSpec(size=1, left=0, right=0)
        return SpeechWorker(context, model, VocoderThread(vocoder, 1), chunks, vocoder)
    painter = make_painter(part)
    thread = ImageThread(painter, 4)
    if stage == "text_encoder":
        return TextWorker(context, model, thread, painter, store)
    if stage == "vae":
        return LatentsWorker(context, model, thread)
    return ImageWorker(context, model, thread, painter, "weights")


async def publish(context: Context, model: str, store: TextStore) -> None:
    """Publish a task of the worker's stage."""
    bus, stage = context.bus, context.stage.name
    if stage == "code2wav":
        await spoken(bus, model, [1, 2])
    elif stage == "dit":
        await publish_request(bus, model, *REQUESTS[0])
    else:
        caller, edge = await caller_of(bus, model, "r"), Edge("dit", stage, "", "item", "fan_out")
        if stage == "vae":
            latents = from_torch(torch.zeros(3, 16, 16, dtype=torch.float64))
            await StageFiles(bus, edge).store(caller, 0, latents, (16, 16), None)
        else:
            await StageTexts(bus, edge, store, "").encode(caller, Encode(("a cat",), "x"))


async def outcomes_of(bus: Bus, stage: str, model: str) -> list[str]:
    """Return the outcomes of the attempts at the only task of a stage."""
    where = subjects.stage_filter(stage, model, "interactive")
    (task,) = await bus.read(subjects.STAGES_STREAM, where)
    name = task.subject.rpartition(".")[2]
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(name))
    attempts = [decode_attempt(message.data) for message in stored]
    return [each.outcome for each in attempts if isinstance(each, AttemptRecord)]


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("dit", "encode"),
        ("dit", "step"),
        ("dit", "pixels"),
        ("text_encoder", "encode"),
        ("vae", "pixels"),
        ("code2wav", "synthesize"),
    ],
)
async def test_a_lost_device_ends_a_generator_and_counts_as_a_death_of_its_request(
    stage: str, part: str, bus: Bus, model: str
) -> None:
    context = make_context(bus, model, stage)
    store = TextStore(bus, await context.open_blobs(), 60.0)
    worker = make_worker(context, model, part, store)
    serving = asyncio.create_task(worker.serve())
    publishing = asyncio.create_task(publish(context, model, store))
    try:
        with pytest.raises(RuntimeError, match="CUDA error"):
            await asyncio.wait_for(serving, 20)
        assert await outcomes_of(bus, stage, model) == ["open"]
    finally:
        publishing.cancel()
        context.shutdown.begin()
        await context.close()
