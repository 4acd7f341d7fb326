"""Cells with requests that harm the workers which process them."""

import asyncio

from ops.chaos import fake_model
from ops.chaos.alterations import RAISING_TEXT, environment, hanging_engine, raising_renderer
from ops.chaos.broker_contents import Store
from ops.chaos.history import WorkerEvent, read_events
from ops.chaos.matrix.cell import cannot_run, cell
from ops.chaos.matrix.cells.common import WORKER_S, altered, new_id, timed, wait_for_load
from ops.chaos.matrix.deployment import Deployment
from shared.errors import PagemillError
from shared.protocol.records import Failure, LogRecord
from shared.protocol.sampling import SamplingParams

cannot_run("poison: raises in encode", "a test: tests/encoder/test_tower.py")


@cell(
    "poison: raises in a step",
    "at every attempt",
    "dead letter",
    on="poison",
    seed=fake_model.RAISES_SEED,
    code="worker_failure",
)
@cell(
    "poison: kills the worker",
    "SIGKILL from inside",
    "2 deaths",
    on="poison",
    seed=fake_model.KILLS_SEED,
    code="poison",
)
async def harm_engines(deployment: Deployment, seed: int, code: str, count: int = 2) -> None:
    """Send requests that harm their engine. Each ends with a dead letter and harms no other."""
    await wait_for_load(deployment)
    async with deployment.bus("poison") as bus:
        tasks = []
        for number in range(count):
            id = new_id(f"poison-{number}")
            sampling = SamplingParams(max_tokens=8, seed=seed, temperature=1.0)
            tasks.append((id, asyncio.create_task(timed(deployment.ask(bus, id, sampling)))))
            await asyncio.sleep(0.5)
        for id, answer in tasks:
            await _check_poison(deployment, id, code, answer)
    await deployment.pool.wait_ready()
    await deployment.probe("after_poison", WORKER_S)


async def _check_poison(
    deployment: Deployment,
    id: str,
    code: str,
    answer: "asyncio.Task[tuple[list[LogRecord], float]]",
) -> None:
    try:
        async with asyncio.timeout(40):
            records, took_s = await answer
    except (TimeoutError, PagemillError) as error:
        deployment.note(f"I11: {id} did not end within 40 s: {error!r}")
        return
    end = records[-1]
    end_code = end.error.code if isinstance(end, Failure) else "finish"
    deployment.outcome.note_largest("poison_s", took_s)
    if end_code != code:
        deployment.note(f"I11: {id} ended with {end_code} instead of {code}")
    harmed = [
        event
        for file in (deployment.folder / "workers").glob("*.jsonl")
        for event in read_events(file)
        if isinstance(event, WorkerEvent) and event.step == "harm" and event.id == id
    ]
    deployment.outcome.note_largest("harmed", len(harmed))
    if code == "poison" and len(harmed) > deployment.settings.max_deaths:
        deployment.note(f"I11: {id} killed {len(harmed)} workers")
    if not await _has_letter(deployment, id):
        deployment.note(f"I11: {id} left no dead letter")


async def _has_letter(deployment: Deployment, id: str) -> bool:
    store = await Store.connect(deployment.url)
    try:
        return any(letter.request_id == id for letter in await store.letters())
    finally:
        await store.close()


@cell("poison: raises in render", "at every attempt", "dead letter", on="poison")
async def raises_in_render(deployment: Deployment) -> None:
    slots = deployment.slots_of("renderer")
    async with (
        altered(deployment, slots, *environment(raising_renderer)),
        deployment.bus("poison") as bus,
    ):
        tasks = []
        for number in range(2):
            id = new_id(f"poison-{number}")
            answer = deployment.ask(bus, id, SamplingParams(max_tokens=8), RAISING_TEXT)
            tasks.append((id, asyncio.create_task(timed(answer))))
        for id, answering in tasks:
            await _check_poison(deployment, id, "worker_failure", answering)


@cell("poison: hangs the step", "forever, in every engine", "its deadline", on="poison", load_s=8)
async def hangs(deployment: Deployment) -> None:
    """Hang the step of every engine forever with a request that has a deadline of 15 s."""
    engines = deployment.slots_of("engine")
    command = (*environment(hanging_engine), "PAGEMILL_ENGINE__STEP_TIMEOUT_S=3")
    async with altered(deployment, engines, *command), deployment.bus("poison") as bus:
        sampling = SamplingParams(max_tokens=8, seed=fake_model.HANGS_SEED, temperature=1.0)
        answer = timed(deployment.ask(bus, new_id("hang"), sampling, timeout_s=15.0))
        records, took_s = await answer
        end = records[-1]
        code = end.error.code if isinstance(end, Failure) else "finish"
        deployment.outcome.figures["poison_s"] = took_s
        if code not in ("poison", "deadline_exceeded"):
            deployment.note(f"I11: ended with {code}")
        await deployment.probe("after_hang", WORKER_S)
