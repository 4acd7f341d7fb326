"""A detour: the engine gets the task once, with its payloads, directly or by the detour."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.config.schema import BlobsConfig, ModelConfig
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.task_messages import EngineBody, KVBlob, RequestTicket, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.pipelines import pipeline_of
from shared.stage.stage import Stage
from shared.telemetry.metrics import Metrics
from tests.shared.stage.test_stage import POLICY

TICKET = RequestTicket(0.0, 0.0, 1, "pm.test.receipt")


@dataclass
class Rig:
    bus: Bus
    blobs: Blobs
    model: str
    queues: dict[str, Consumer]

    def stage(self, name: str) -> Stage:
        pipelines = {self.model: pipeline_of(ModelConfig("nowhere", prefill="prefill"))}
        worker = f"{name}-test"
        metrics = Metrics(name, worker)
        return Stage(self.bus, name, worker, "0", POLICY, metrics, pipelines, self.blobs)

    async def job(self, stage: Stage) -> tuple[Job, EngineBody]:
        """The next job of a stage, decoded as the loop does it."""
        delivery = await asyncio.wait_for(self.queues[stage.name].next(), 10)
        job = stage.receive(delivery)
        assert job is not None
        if not delivery.data:
            job.identify(TaskHeader(str(job.request_id), self.model, "interactive", TICKET))
            return job, EngineBody([], [])
        task, _ = envelope.decode(delivery.data, Task[EngineBody])
        job.identify(task.header)
        job.inputs = task.body.blobs()
        return job, task.body

    async def acknowledge(self, stage: Stage, job: Job) -> None:
        """Settle a job as at the end of its output."""
        await stage._acknowledge(job)

    async def accept(self) -> str:
        name = f"t-{secrets.token_hex(6)}"
        subject = subjects.stage("renderer", self.model, "interactive", name)
        await self.bus.publish(subject, b"", name)
        return name

    def image(self) -> tuple[BlobRef, EngineBody]:
        """A rendered prompt with an image, and the image's payload."""
        mm_hash = secrets.token_hex(32)
        ref = self.blobs.put(mm_hash, [b"pixels"], 60)
        assert ref is not None
        item = MultiModalKwargsItem("image", mm_hash, PlaceholderRange(0, 4), blob=ref)
        return ref, EngineBody([1] * 9, [item])

    def kv(self) -> KVBlob:
        name = secrets.token_hex(32)
        ref = self.blobs.put(name, [b"keys and values"], 60)
        assert ref is not None
        return KVBlob(ref, name, 0, 1, b"")

    async def is_there(self, ref: BlobRef) -> bool:
        try:
            (await self.blobs.get(ref)).close()
        except BlobLost:
            return False
        return True


@pytest.fixture
async def rig(bus: Bus) -> AsyncIterator[Rig]:
    blobs = Blobs(bus, "test", f"test-{secrets.token_hex(4)}", BlobsConfig(arena_mib=1))
    await blobs.start()
    model = f"m-{secrets.token_hex(4)}"
    queues = {
        stage: await bus.queues.consume(
            subjects.STAGES_STREAM,
            subjects.stage_consumer(stage, model, "interactive"),
            subjects.stage_filter(stage, model, "interactive"),
            4,
            30.0,
        )
        for stage in ("renderer", "prefill", "engine")
    }
    yield Rig(bus, blobs, model, queues)
    for queue in queues.values():
        await queue.stop()
    await blobs.close()


async def test_a_result_makes_a_detour_and_comes_to_the_engine(rig: Rig) -> None:
    renderer, prefill, engine = (rig.stage(n) for n in ("renderer", "prefill", "engine"))
    await rig.accept()
    job, _ = await rig.job(renderer)
    pixels, body = rig.image()
    job.outputs.append(pixels)
    await renderer.forward(job, body, detour=True)
    assert job.outputs == []
    job, received = await rig.job(prefill)
    assert received == body
    kv = rig.kv()
    job.outputs.append(kv.ref)
    with_kv = EngineBody(body.prompt_token_ids, body.items, [kv])
    await prefill.forward(job, with_kv)
    await prefill.discard_outputs(job)
    job, received = await rig.job(engine)
    assert received == with_kv
    assert [span.stage for span in job.path] == ["renderer", "prefill"]
    assert await rig.is_there(pixels)
    assert await rig.is_there(kv.ref)
    await rig.acknowledge(engine, job)
    assert not await rig.is_there(pixels)
    assert not await rig.is_there(kv.ref)
    assert rig.blobs.num_pinned == 0


async def test_a_worker_that_died_before_its_acknowledgement_has_handed_over_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's task has its payloads, and the next attempt's are released."""
    renderer, prefill, engine = (rig.stage(n) for n in ("renderer", "prefill", "engine"))
    await rig.accept()
    job, _ = await rig.job(renderer)
    pixels, body = rig.image()
    await renderer.forward(job, body, detour=True)
    job, _ = await rig.job(prefill)
    first, second = rig.kv(), rig.kv()

    async def die(job: Job) -> None:
        raise ConnectionError

    monkeypatch.setattr(prefill, "_acknowledge", die)
    with pytest.raises(ConnectionError):
        await prefill.forward(job, EngineBody(body.prompt_token_ids, body.items, [first]))
    monkeypatch.undo()
    prefill.claims.release(job)
    await job.delivery.retry(0)
    job, _ = await rig.job(prefill)
    job.outputs.append(second.ref)
    await prefill.forward(job, EngineBody(body.prompt_token_ids, body.items, [second]))
    await prefill.discard_outputs(job)
    assert not await rig.is_there(second.ref)
    job, received = await rig.job(engine)
    assert received.kv == [first]
    assert await rig.is_there(pixels)
    await rig.acknowledge(engine, job)
    assert rig.blobs.num_pinned == 0


async def test_a_request_that_was_rendered_twice_is_computed_once(rig: Rig) -> None:
    """A late renderer forwards a request directly that another one has sent on a detour."""
    renderer, prefill, engine = (rig.stage(n) for n in ("renderer", "prefill", "engine"))
    await rig.accept()
    job, _ = await rig.job(renderer)
    (detoured, body), (straight, other) = rig.image(), rig.image()
    job.outputs.append(detoured)
    await renderer.forward(job, body, detour=True)
    job.outputs.append(straight)
    await renderer.forward(job, other)
    job, _ = await rig.job(prefill)
    kv = rig.kv()
    job.outputs.append(kv.ref)
    await prefill.forward(job, EngineBody(body.prompt_token_ids, body.items, [kv]))
    await prefill.discard_outputs(job)
    assert not await rig.is_there(detoured)
    assert not await rig.is_there(kv.ref)
    job, received = await rig.job(engine)
    assert received == other
    assert await rig.is_there(straight)
    await rig.acknowledge(engine, job)
    assert rig.blobs.num_pinned == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.queues["engine"].next(), 0.5)


def test_a_task_without_blocks_is_the_same_bytes_as_before() -> None:
    body = EngineBody([1, 2], [])
    task = Task(TaskHeader("r", "m", "batch", TICKET), body)
    assert b"kv" not in bytes(envelope.encode(task, []))
