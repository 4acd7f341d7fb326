"""Cells with requests that harm whoever works on them."""

import asyncio

from ops.chaos import fake_model
from ops.chaos.broker_contents import Store
from ops.chaos.history import Did, read_events
from ops.chaos.matrix.cells.common import WORKER_S, lead_in, new_id, redressed, timed
from ops.chaos.matrix.scene import Disturb, Scene
from shared.errors import PagemillError
from shared.protocol.messages import Failure, LogRecord
from shared.protocol.sampling import SamplingParams


def poison(seed: int, code: str, count: int = 2) -> Disturb:
    """Requests that harm the engine which runs them; each ends, is kept, and harms nobody else."""

    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        async with scene.bus("poison") as bus:
            asked = []
            for number in range(count):
                id = new_id(f"poison-{number}")
                sampling = SamplingParams(max_tokens=8, seed=seed, temperature=1.0)
                asked.append((id, asyncio.create_task(timed(scene.ask(bus, id, sampling)))))
                await asyncio.sleep(0.5)
            for id, answer in asked:
                await _judge_poison(scene, id, code, answer)
        await scene.pool.wait_ready()
        await scene.probe("after_poison", WORKER_S)

    return disturb


async def _judge_poison(
    scene: Scene, id: str, code: str, answer: "asyncio.Task[tuple[list[LogRecord], float]]"
) -> None:
    try:
        async with asyncio.timeout(40):
            records, took_s = await answer
    except (TimeoutError, PagemillError) as error:
        scene.note(f"I11: {id} did not end within 40 s: {error!r}")
        return
    end = records[-1]
    found = end.error.code if isinstance(end, Failure) else "finish"
    key = "poison_s"
    scene.outcome.figures[key] = max(took_s, scene.outcome.figures.get(key, 0.0))
    if found != code:
        scene.note(f"I11: {id} ended with {found} instead of {code}")
    harmed = [
        event
        for file in (scene.folder / "workers").glob("*.jsonl")
        for event in read_events(file)
        if isinstance(event, Did) and event.what == "harm" and event.id == id
    ]
    scene.outcome.figures["harmed"] = max(len(harmed), int(scene.outcome.figures.get("harmed", 0)))
    if seed_of_kill(code) and len(harmed) > scene.settings.max_deaths:
        scene.note(f"I11: {id} killed {len(harmed)} workers")
    if not await _has_letter(scene, id):
        scene.note(f"I11: {id} left no dead letter")


def seed_of_kill(code: str) -> bool:
    return code == "poison"


async def _has_letter(scene: Scene, id: str) -> bool:
    store = await Store.connect(scene.url)
    try:
        return any(letter.request_id == id for letter in await store.letters())
    finally:
        await store.close()


RAISING_TEXT = "raise in the renderer"


_RAISING_RENDERER = f"""
import sys
from ops.chaos import fake_model
from ops.chaos.worker import watched_worker
tokenize = fake_model.FakeProcessor.tokenize
def poisoned(self, asked):
    if any(m.content == {RAISING_TEXT!r} for m in asked.messages):
        raise RuntimeError("a poisoned picture")
    return tokenize(self, asked)
fake_model.FakeProcessor.tokenize = poisoned
sys.exit(watched_worker.app(sys.argv[1:], result_action="return_value"))
"""


async def raises_in_render(scene: Scene) -> None:
    slots = [slot for slot in scene.pool.slots if slot.role == "renderer"]
    for slot in slots:
        scene.dress(slot, program=_RAISING_RENDERER)
    await redressed(scene, slots)
    try:
        async with scene.bus("poison") as bus:
            asked = []
            for number in range(2):
                id = new_id(f"poison-{number}")
                answer = scene.ask(bus, id, SamplingParams(max_tokens=8), RAISING_TEXT)
                asked.append((id, asyncio.create_task(timed(answer))))
            for id, answer_ in asked:
                await _judge_poison(scene, id, "worker_failure", answer_)
    finally:
        for slot in slots:
            scene.dress(slot)
        await redressed(scene, slots)


kills = poison(fake_model.KILLS_SEED, "poison")


raises = poison(fake_model.RAISES_SEED, "worker_failure")


_HANGING_ENGINE = """
import os, sys, time
os.environ["PAGEMILL_ENGINE__STEP_TIMEOUT_S"] = "3"
from ops.chaos import fake_model
from ops.chaos.worker import watched_worker
def harm(self, sequence, *_):
    if sequence.seed == fake_model.HANGS_SEED:
        time.sleep(3600)
fake_model.FakeRunner._harm = harm
sys.exit(watched_worker.app(sys.argv[1:], result_action="return_value"))
"""


async def hangs(scene: Scene) -> None:
    """A request at which the step of every engine hangs for ever; it has 15 s of time."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    for slot in engines:
        scene.dress(slot, program=_HANGING_ENGINE)
    await redressed(scene, engines)
    try:
        async with scene.bus("poison") as bus:
            sampling = SamplingParams(max_tokens=8, seed=fake_model.HANGS_SEED, temperature=1.0)
            answer = timed(scene.ask(bus, new_id("hang"), sampling, timeout_s=15.0))
            records, took_s = await answer
            end = records[-1]
            code = end.error.code if isinstance(end, Failure) else "finish"
            scene.outcome.figures["poison_s"] = took_s
            if code not in ("poison", "deadline_exceeded"):
                scene.note(f"I11: ended with {code}")
            await scene.probe("after_hang", WORKER_S)
    finally:
        for slot in engines:
            scene.dress(slot)
        await redressed(scene, engines)
