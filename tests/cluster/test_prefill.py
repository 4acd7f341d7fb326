"""Prompts that prefill workers compute give the tokens of one engine, also during faults."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from transformers import Qwen2VLForConditionalGeneration

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import Finish, LogRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from tests.adapters import ATTENTION, MLP, write_adapter
from tests.cluster.conftest import (
    CONFIG,
    Cluster,
    answer,
    kill,
    living,
    start_cluster,
    stop_cluster,
    stopped,
)
from tests.cluster.streams import assert_gapless, tokens_of
from workers.cli.ask import build_request
from workers.settings import DEMO_MODEL

APART = CONFIG.replace(
    "max_model_len: 1024",
    "max_model_len: 1024\n    dtype: float64\n    prefill: prefill\n    min_prefill_tokens: 16"
    "\n    adapters: {tuned: adapters/tuned}",
)
WORDS = ["red", "large", "circle", "left", "what", "color", "shape", "many", "is", "the", "image"]
PICTURES = ["red.png", "blue.png", "three_squares.png", "green_circle.png"]
AT_ONCE = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("prefill")
    model = Qwen2VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    write_adapter(folder / "adapters" / "tuned", model, [*ATTENTION, *MLP], 4, 8, 1, spread=1.0)
    running = start_cluster(folder, APART)
    yield running
    stop_cluster(running)


def requests_of(seed: int, count: int) -> list[GenerateRequest]:
    """Return distinct prompts, some with an image, an adapter, or three sampled choices."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=24))
        images = [IMAGES / rng.choice(PICTURES)] if number % 3 == 0 else []
        sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        if number % 2:
            sampling |= {"n": 3, "temperature": 0.9, "seed": rng.getrandbits(30)}
        adapter = "tuned" if number % 5 == 4 else None
        requests.append(build_request("demo", text, images, sampling, adapter=adapter))
    return requests


async def ask_all(bus: Bus, requests: Sequence[GenerateRequest]) -> list[list[LogRecord]]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(request: GenerateRequest) -> list[LogRecord]:
        async with slots:
            return await answer(bus, request)

    return list(await asyncio.gather(*map(ask, requests)))


def finish_of(records: Sequence[LogRecord]) -> Finish:
    assert_gapless(records)
    assert isinstance(records[-1], Finish), records[-1]
    return records[-1]


def is_detoured(records: Sequence[LogRecord]) -> bool:
    return "prefill" in [span.stage for span in finish_of(records).path]


async def until_detours_are_open(bus: Bus) -> None:
    """Until a worker is ready, and renderers that have taken its tasks have stopped."""
    async with asyncio.timeout(120):
        for seed in range(1000, 2000):
            if is_detoured(await answer(bus, requests_of(seed, 1)[0])):
                return


async def assert_alone_the_same(
    bus: Bus, requests: Sequence[GenerateRequest], answers: Sequence[Sequence[LogRecord]]
) -> None:
    """Ask again, for answers that the engine computes from the first token on."""
    for request, records in zip(requests, answers, strict=True):
        assert isinstance(request.sampling_params, SamplingParams)
        sampling = msgspec.structs.replace(request.sampling_params, skip_reading_prefix_cache=True)
        alone = await answer(bus, msgspec.structs.replace(request, sampling_params=sampling))
        assert not is_detoured(alone)
        assert finish_of(alone).usage.cached_tokens == 0
        for choice in range(request.sampling_params.n):
            assert tokens_of(records, choice) == tokens_of(alone, choice)


async def until_all_payloads_are_released(bus: Bus) -> None:
    async with asyncio.timeout(30):
        while True:
            beats = [b for role in ("renderer", "prefill") for b in await living(bus, role)]
            if {beat.load["arena_pinned"] for beat in beats} == {0}:
                return
            await asyncio.sleep(0.2)


async def test_engines_use_the_blocks_and_answer_the_same(client: Bus) -> None:
    await until_detours_are_open(client)
    requests = requests_of(1, 12)
    answers = await ask_all(client, requests)
    usages = [finish_of(records).usage for records in answers if is_detoured(records)]
    # An engine computes the last block, of up to eight tokens. On a busy machine it may have had to
    # compute all, because the blocks came too late.
    assert any(usage.prompt_tokens - usage.cached_tokens <= 8 for usage in usages)
    await assert_alone_the_same(client, requests, answers)
    await until_all_payloads_are_released(client)


async def test_a_worker_that_dies_with_prompts_costs_time(cluster: Cluster, client: Bus) -> None:
    await until_detours_are_open(client)
    pid = await cluster.pid(client, "prefill")
    requests = requests_of(2, 4)
    consumer = subjects.stage_consumer("prefill", "demo", "interactive")
    with stopped(pid):
        asking = asyncio.create_task(ask_all(client, requests))
        async with asyncio.timeout(30):
            while True:
                depth = await client.figures.depth(subjects.STAGES_STREAM, consumer)
                if depth.num_in_flight + depth.num_pending or asking.done():
                    break
                await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    answers = await asking
    assert any(is_detoured(records) for records in answers)
    await assert_alone_the_same(client, requests, answers)


@pytest.mark.long
async def test_workers_that_are_killed_again_and_again_change_no_token(
    cluster: Cluster, client: Bus
) -> None:
    await until_detours_are_open(client)
    requests = requests_of(3, 24)
    killed: list[int] = []

    async def kill_all() -> None:
        while True:
            for beat in await living(client, "prefill"):
                if beat.load.get("prefilled", 0) or beat.load.get("held", 0):
                    kill(beat.pid)
                    killed.append(beat.pid)
            await asyncio.sleep(0.3)

    killing = asyncio.create_task(kill_all())
    try:
        answers = await ask_all(client, requests)
    finally:
        killing.cancel()
    assert killed
    await assert_alone_the_same(client, requests, answers)
    await cluster.pid(client, "prefill")
    await until_all_payloads_are_released(client)
