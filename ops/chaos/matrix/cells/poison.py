"""Cells with requests that harm whoever works on them."""

import asyncio

from ops.chaos import fake_model
from ops.chaos.alterations import (
    RAISING_TEXT,
    environment,
    hanging_engine,
    raising_renderer,
)
from ops.chaos.broker_contents import Store
from ops.chaos.history import Did, read_events
from ops.chaos.matrix.cells.common import WORKER_S, dressed, lead_in, new_id, timed
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


async def raises_in_render(scene: Scene) -> None:
    slots = [slot for slot in scene.pool.slots if slot.role == "renderer"]
    async with (
        dressed(scene, slots, *environment(raising_renderer)),
        scene.bus("poison") as bus,
    ):
        asked = []
        for number in range(2):
            id = new_id(f"poison-{number}")
            answer = scene.ask(bus, id, SamplingParams(max_tokens=8), RAISING_TEXT)
            asked.append((id, asyncio.create_task(timed(answer))))
        for id, answer_ in asked:
            await _judge_poison(scene, id, "worker_failure", answer_)


kills = poison(fake_model.KILLS_SEED, "poison")


raises = poison(fake_model.RAISES_SEED, "worker_failure")


async def hangs(scene: Scene) -> None:
    """Hang the step of every engine for ever with a request that has a deadline of 15 s."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    command = (*environment(hanging_engine), "PAGEMILL_ENGINE__STEP_TIMEOUT_S=3")
    async with dressed(scene, engines, *command), scene.bus("poison") as bus:
        sampling = SamplingParams(max_tokens=8, seed=fake_model.HANGS_SEED, temperature=1.0)
        answer = timed(scene.ask(bus, new_id("hang"), sampling, timeout_s=15.0))
        records, took_s = await answer
        end = records[-1]
        code = end.error.code if isinstance(end, Failure) else "finish"
        scene.outcome.figures["poison_s"] = took_s
        if code not in ("poison", "deadline_exceeded"):
            scene.note(f"I11: ended with {code}")
        await scene.probe("after_hang", WORKER_S)
