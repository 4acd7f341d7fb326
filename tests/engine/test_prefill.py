"""A whole prefill worker: it forwards a task with the blocks of its prompt, or as it came."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.config.schema import BlobsConfig, Config, DeliveryConfig, ModelConfig
from shared.errors import BlobLost, WorkerFailure
from shared.protocol import subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, KVBlob, RequestTicket, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.state.token_log import end_request
from tests.engine.core.test_kv_exchange import Engine, request_of
from tests.fakes import FakeLaunched
from tests.support.waiting import until
from tests.support.workers import Announcement
from tests.tasks import engine_task
from workers.engine import kv_transfer, prefill
from workers.engine.core.sequence import Batch
from workers.engine.item_loader import ItemLoader
from workers.engine.kv_transfer import KVLayout, KVReader
from workers.engine.main import Built
from workers.engine.prefill import PrefillWorker

LAYOUT = KVLayout(["model"], {None: ""})
SAMPLING = SamplingParams(max_tokens=7, n=3, temperature=0.5, ignore_eos=True)


@dataclass
class Rig:
    bus: Bus
    model: str
    context: Context
    worker: PrefillWorker
    engine: Engine
    blobs: Blobs
    inbox: Consumer
    """The engines' queue."""
    announced: Announcement

    def load(self) -> dict[str, float]:
        return self.announced.load()

    async def put(
        self, token_ids: list[int], items: list[MultiModalKwargsItem] | None = None
    ) -> str:
        return await put(self.bus, self.model, token_ids, items)

    async def next(self) -> Task[EngineBody]:
        delivery = await asyncio.wait_for(self.inbox.next(), 20)
        await delivery.ack()
        return envelope.decode(delivery.data, Task[EngineBody])[0]

    async def until_idle(self) -> None:
        await until(lambda: not self.worker._loop.num_claimed)


async def put(
    bus: Bus,
    model: str,
    token_ids: list[int],
    items: list[MultiModalKwargsItem] | None = None,
    name: str = "",
) -> str:
    """Publish a prefill worker's task."""
    name, now_ms = name or f"r-{secrets.token_hex(6)}", bus.now_ms()
    ticket = RequestTicket(now_ms, now_ms + 60_000, 1, "pm.test.receipt", "tenant")
    task = engine_task(
        name, token_ids, items or [], SAMPLING, model=model, lane="interactive", ticket=ticket
    )
    subject = subjects.stage("prefill", model, "interactive", name)
    await bus.publish(subject, envelope.encode(task, []), name)
    return name


def new_model() -> str:
    return f"m-{secrets.token_hex(4)}"


async def consume(bus: Bus, stage: str, model: str) -> Consumer:
    return await bus.queues.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer(stage, model, "interactive"),
        subjects.stage_filter(stage, model, "interactive"),
        8,
        30.0,
    )


@contextlib.asynccontextmanager
async def prefill_worker(bus: Bus, model: str) -> AsyncIterator[Rig]:
    name = f"prefill-{secrets.token_hex(4)}"
    config = Config(
        {model: ModelConfig("nowhere", prefill="prefill")}, blobs=BlobsConfig(arena_mib=1)
    )
    context = Context("prefill", name, model, config, bus, structlog.get_logger())
    blobs = await context.open_blobs()
    engine = Engine(seed=4)
    built = Built(
        model,
        None,  # type: ignore[arg-type]
        engine.core,
        ItemLoader(blobs, None, lambda tensor: tensor, False),
        blobs,
        LAYOUT,
    )
    worker = PrefillWorker(context, built)
    inbox = await consume(bus, "engine", model)
    await bus.add_responder("pm.test.receipt", lambda receipt: b"+OK")
    announced = Announcement(context)
    serving = asyncio.create_task(worker.serve())
    await announced.wait()
    try:
        yield Rig(bus, model, context, worker, engine, blobs, inbox, announced)
    finally:
        context.shutdown.signal()
        try:
            await serving
        finally:
            await inbox.stop()
            await context.close()


@pytest.fixture
async def rig(bus: Bus) -> AsyncIterator[Rig]:
    async with prefill_worker(bus, new_model()) as rig:
        yield rig


PROMPT = request_of().prompt_token_ids


async def test_the_engine_gets_the_task_with_the_blocks_of_its_prompt(rig: Rig) -> None:
    await rig.put(PROMPT)
    task = await rig.next()
    assert task.header.sampling == SAMPLING
    assert [span.stage for span in task.header.path] == ["prefill"]
    assert task.body.prompt_token_ids == PROMPT
    assert sum(blocks.num_blocks for blocks in task.body.kv) == 10
    assert task.body.blobs() == [blocks.ref for blocks in task.body.kv]
    request = request_of(n=3, tenant="tenant")
    other = Engine(seed=1)
    received = await KVReader(rig.blobs, LAYOUT, other.core.kv_exchange).read(request, task.body.kv)
    assert sum(len(run.hashes) for run in received.runs) == 10
    await rig.until_idle()
    # They are the engine's now, until it acknowledges its task.
    for ref in task.body.blobs():
        rig.blobs.discard(ref)
    assert rig.load()["held"] == 0


async def test_payloads_of_images_are_passed_on(rig: Rig) -> None:
    """They are not released with the task that they came with."""
    ref = rig.blobs.put("ab" * 32, [envelope_of_item()], 60)
    assert ref is not None
    item = MultiModalKwargsItem("image", "ab" * 32, PlaceholderRange(2, 4), blob=ref)
    await rig.put(PROMPT, [item])
    task = await rig.next()
    assert task.body.kv
    await rig.until_idle()
    assert task.body.items == [item]
    (await rig.blobs.get(ref)).close()


def envelope_of_item() -> bytes:
    from shared.blobs.mm_items import ItemContents

    return b"".join(bytes(part) for part in envelope.encode_parts(ItemContents({}, 4), []))


async def test_a_task_that_comes_again_goes_straight_on(bus: Bus) -> None:
    """A worker has died with it, for an unknown reason."""
    model = new_model()
    first = await consume(bus, "prefill", model)
    name = await put(bus, model, PROMPT)
    await (await asyncio.wait_for(first.next(), 10)).retry(0)
    await first.stop()
    async with prefill_worker(bus, model) as rig:
        task = await rig.next()
        assert task.header.request_id == name
        assert task.body == EngineBody(PROMPT, [])
        assert rig.engine.core.stats().num_steps == 0


async def test_a_prompt_that_cannot_be_computed_goes_straight_on(rig: Rig) -> None:
    """The engine finds the same fault and reports it."""
    await rig.put([999])
    assert (await rig.next()).body == EngineBody([999], [])
    ref = BlobRef("prefill-gone", bytes(32), 10)
    lost = MultiModalKwargsItem("image", "cd" * 32, PlaceholderRange(2, 4), blob=ref)
    await rig.put(PROMPT, [lost])
    assert (await rig.next()).body == EngineBody(PROMPT, [lost])


async def test_an_encoder_is_not_waited_for_as_long_as_the_engine_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that wait for no encoder are queued after this one."""

    async def wait(key: str, mm_hash: str, progress: Callable[[], Awaitable[None]]) -> None:
        while True:
            await progress()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(prefill, "MAX_WAIT_S", 0.2)
    monkeypatch.setattr(rig.worker._engine.items, "_embeddings", SimpleNamespace(wait=wait))
    item = MultiModalKwargsItem("image", "ab" * 32, PlaceholderRange(2, 4), embedding="cd" * 32)
    await rig.put(PROMPT, [item])
    assert (await rig.next()).body == EngineBody(PROMPT, [item])


async def test_blocks_that_no_task_names_are_released(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would before they expire."""
    store = kv_transfer.store

    async def fail_afterwards(*args: Any) -> list[KVBlob]:
        await store(*args)
        raise BlobLost("evicted before it was read")

    monkeypatch.setattr(kv_transfer, "store", fail_afterwards)
    await rig.put(PROMPT)
    assert (await rig.next()).body.kv == []
    await rig.until_idle()
    assert rig.blobs.num_pinned == 0


async def test_blocks_without_room_go_straight_on(rig: Rig) -> None:
    filler = rig.blobs.put("ef" * 32, [bytes(2**20)], 60)
    assert filler is not None
    await rig.put(PROMPT)
    assert (await rig.next()).body.kv == []


async def test_a_request_that_has_ended_is_not_forwarded(rig: Rig) -> None:
    name = f"r-{secrets.token_hex(6)}"
    await end_request(rig.bus, name, 1, WorkerFailure("it was ended"), [])
    await put(rig.bus, rig.model, PROMPT, name=name)
    other = await rig.put(PROMPT)
    assert (await rig.next()).header.request_id == other


def hold_steps(rig: Rig) -> tuple[asyncio.Event, threading.Event]:
    """Hold all steps. The first event is set when a step has begun; the second releases them."""
    runner, began, go_on = rig.engine.runner, asyncio.Event(), threading.Event()
    launch, loop = runner.launch, asyncio.get_running_loop()

    def launch_slowly(batch: Batch) -> FakeLaunched:
        loop.call_soon_threadsafe(began.set)
        go_on.wait(20)
        return launch(batch)

    runner.launch = launch_slowly  # type: ignore[method-assign]
    return began, go_on


async def test_a_request_that_ends_meanwhile_is_let_go(rig: Rig) -> None:
    began, go_on = hold_steps(rig)
    name = await rig.put(PROMPT)
    await asyncio.wait_for(began.wait(), 10)
    await end_request(rig.bus, name, 1, WorkerFailure("it was ended"), [])
    await rig.bus.notify(subjects.ended(name))
    await rig.until_idle()
    go_on.set()
    other = await rig.put(PROMPT)
    assert (await rig.next()).header.request_id == other


async def test_tasks_that_wait_for_a_hanging_step_go_straight_to_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends much later, in case that the step ends after all."""
    delivery = DeliveryConfig(ack_wait_s=0.5)
    changed = msgspec.structs.replace(rig.context.config, delivery=delivery)
    monkeypatch.setattr(rig.context, "config", changed)
    began, go_on = hold_steps(rig)
    name = await rig.put(PROMPT)
    await asyncio.wait_for(began.wait(), 10)
    task = await rig.next()
    assert (task.header.request_id, task.body) == (name, EngineBody(PROMPT, []))
    assert rig.load()["draining"] == 1
    # One that comes now does not wait for the step at all.
    await rig.put(PROMPT)
    assert (await rig.next()).body.kv == []
    await rig.until_idle()
    go_on.set()
    await until(lambda: not rig.load()["draining"])
    await rig.put(PROMPT)
    assert (await rig.next()).body.kv


async def test_the_age_of_the_oldest_task_is_reported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = asyncio.Queue[Job]()

    async def hold(_task: object, _tensors: object, job: Job) -> Any:
        jobs.put_nowait(job)
        await asyncio.Event().wait()

    monkeypatch.setattr(rig.worker, "_prefill", hold)
    assert rig.load()["oldest_s"] == 0
    await rig.put(PROMPT)
    job = await asyncio.wait_for(jobs.get(), 10)
    load = rig.load()
    assert (load["held"], load["draining"]) == (1, 0)
    assert load["oldest_s"] > 0
    job.delivery.stored_ms -= 5000
    assert rig.load()["oldest_s"] > 5
    monkeypatch.undo()
    rig.context.shutdown.begin()
    assert rig.load()["draining"] == 1
    rig.context.shutdown.hurry.set()


async def test_a_lost_device_ends_the_worker_and_counts_as_a_death_of_its_task(bus: Bus) -> None:
    model = new_model()

    def lose_device(batch: Batch) -> FakeLaunched:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def prefill() -> None:
        async with prefill_worker(bus, model) as rig:
            rig.engine.runner.launch = lose_device  # type: ignore[method-assign]
            await put(bus, model, PROMPT, name=f"r-{model}")
            await asyncio.wait_for(rig.context.shutdown.hurry.wait(), 20)

    with pytest.raises(RuntimeError, match="CUDA error"):
        await prefill()
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(f"r-{model}"))
    attempts = [decode_attempt(message.data) for message in stored]
    assert [each.outcome for each in attempts if isinstance(each, AttemptRecord)] == ["open"]
