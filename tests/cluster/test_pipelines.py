"""Pipelines of diffusers by real processes: killed after each step, cancelled, and equal requests.

    request ──▶ dit

In float64, each file equals the pixels of diffusers' own pipeline with the same noise.
"""

import asyncio
import base64
import functools
import io
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from ops.plain_painting import steps_alone
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.images import AUTO, ImageParams, PaintParams, parse_size
from shared.protocol.messages import decode_dead_letter
from shared.protocol.names import scoped_id, split_id
from shared.protocol.records import Failure, Finish, ImageRecord, StepState
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from tests import preloaded
from tests.cluster.conftest import until_ready
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.gateway.batches.conftest import begin, ended, lines_of, results_of
from tests.generator.pipelines import (
    flux,
    pixart_sigma,
    qwen_image_edit,
    stable_diffusion_3,
    z_image,
)
from tests.generator.pipelines.input_images import FILES, SQUARE, WIDE
from tests.generator.pipelines.spec import PipelineSpec, Request, to_file
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.generator.core.denoising import Step, Stepped
from workers.generator.diffusion.flux import Flux
from workers.generator.diffusion.pixart_sigma import PixArtSigma
from workers.generator.diffusion.qwen_image_edit import QwenImageEdit
from workers.generator.diffusion.stable_diffusion_3 import StableDiffusion3
from workers.generator.diffusion.z_image import ZImage
from workers.generator.image_loader import load_image_model
from workers.generator.image_parts import to_png

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

MODULES = (flux, stable_diffusion_3, z_image, pixart_sigma, qwen_image_edit)
SPECS: dict[str, PipelineSpec] = {
    module.SPEC.name: module.SPEC._replace(paint_whole=functools.cache(module.SPEC.paint_whole))
    for module in MODULES
}
CONFIG = """
generator: {checkpoint_s: 0, threads: 1}
gateway: {port: 0}
delivery: {ack_wait_s: 1.0, drain_s: 5.0, retry_delay_s: 0.1}
models:
"""
MODEL = """
  NAME:
    path: NAME
    dtype: float64
    stages: {dit: {sizes: [SIZES]}}
"""
CONTROL = {name: [name] for name in ("coordinator", "gateway", "batcher")}
WORKERS = CONTROL | {name: ["generator", "--model", name] for name in SPECS}
STEP_S = 0.15
"""Minimum time of a step, so that a worker can be killed between two steps."""
DEADLY = 6.5
"""Guidance of an image with a second step that kills the worker."""
PROMPT = "a red circle"


def register_roles() -> None:
    for model in (Flux, StableDiffusion3, ZImage, PixArtSigma, QwenImageEdit):
        slow_down(model, "step", STEP_S)
    step = Flux.step

    def deadly_step(self: Flux, steps: Sequence[Step]) -> list[Stepped]:
        if any(one.guidance == DEADLY and one.number == 1 for one in steps):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, steps)

    setattr(Flux, "step", deadly_step)  # noqa: B010 - mypy refuses an assignment to a method


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("pipelines")
    config = CONFIG
    for name, spec in SPECS.items():
        spec.write(folder / name)
        config += MODEL.replace("NAME", name).replace("SIZES", ", ".join(spec.sizes))
    (folder / "pagemill.yaml").write_text(config)
    with running(folder, WORKERS, __name__) as started:
        yield started


@pytest.fixture
async def bus(processes: Processes) -> AsyncIterator[Bus]:
    connected = await Bus.connect(processes.url, "test")
    await until_ready(connected, CONTROL)
    await until(partial(have_generators, connected, Counter([*SPECS])), 150)
    yield connected
    await connected.close()


async def have_generators(bus: Bus, least: Counter[str]) -> bool:
    beats = await bus.heartbeats.read()
    return Counter(m for b in beats if b.role == "generator" for m in b.models) >= least


async def log_of(bus: Bus, request_id: str) -> list[Any]:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "image"))
    records = (decode_record(message.data) for message in stored)
    return [record for record in records if record is not None]


async def steps_of(bus: Bus, request_id: str) -> list[StepState]:
    return [one for one in await log_of(bus, request_id) if isinstance(one, StepState)]


async def have_steps(bus: Bus, *request_ids: str, step: int = 1) -> bool:
    states = [await steps_of(bus, request_id) for request_id in request_ids]
    return all(any(state.step >= step for state in steps) for steps in states)


async def order_of(
    bus: Bus, spec: PipelineSpec, request: Request, tenant: str = "", **fields: Any
) -> GenerateRequest:
    """Return a request over the bus; its images to edit are stored first."""
    prompt, params = request
    for url in params.input_images:
        await client.pin_media(bus, FILES[url], tenant)
    options = ImageParams(
        None if params.size == AUTO else params.size,
        params.n,
        params.steps,
        params.guidance,
        params.negative_prompt or None,
        params.seed,
        input_images=params.input_images,
    )
    return GenerateRequest(spec.name, prompt=prompt, image=options, **fields)


async def last_of(bus: Bus, request_id: str, request: GenerateRequest) -> Any:
    return [record async for record in client.ask(bus, request, request_id)][-1]


async def files_of(bus: Bus, request_id: str) -> dict[int, bytes]:
    """Return the files of a request's images by their numbers."""
    records = [record async for record in client.follow_output(bus, request_id, "image")]
    tenant = split_id(request_id)[1]
    return {
        image.number: await client.read_media(bus, image.media, tenant)
        for image in records
        if isinstance(image, ImageRecord)
    }


def assert_painted(spec: PipelineSpec, file: bytes, request: Request, number: int = 0) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(file)))
    np.testing.assert_array_equal(pixels, to_file(spec.paint_whole(*request, number)))


async def metrics_of(processes: Processes, model: str) -> dict[str, float]:
    """Return sums of the metrics of a model over all generators."""
    options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
    done = await asyncio.to_thread(preloaded.run, "metrics", *options)
    assert done.returncode == 0, done.stderr
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(done.stdout):
        for sample in family.samples:
            if sample.labels.get("model") == model and "le" not in sample.labels:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.parametrize("name", SPECS)
async def test_the_generator_is_killed_after_each_step_of_requests_that_share_batches(
    processes: Processes, bus: Bus, name: str
) -> None:
    spec = SPECS[name]
    requests = {
        f"{name}-{number}": (prompt, replace(params, steps=4, n=2 - number))
        for number, (prompt, params) in enumerate(spec.requests[:2])
    }
    painting: dict[str, asyncio.Task[Any]] = {}
    for request_id, request in requests.items():
        order = await order_of(bus, spec, request, timeout_s=150.0)
        painting[request_id] = asyncio.create_task(last_of(bus, request_id, order))
    num_kills = 0
    before = Counter[str]()

    async def progress() -> Counter[str] | None:
        """The lengths of the logs, if all requests have made progress or have ended."""
        lengths = Counter({id: len(await log_of(bus, id)) for id in requests})
        still = [id for id in requests if lengths[id] <= before[id] and not painting[id].done()]
        return None if still else lengths

    while not all(task.done() for task in painting.values()):
        before = await until(progress, 100)
        processes.kill(name)
        num_kills += 1
    assert num_kills >= 3
    for request_id, (prompt, params) in requests.items():
        assert isinstance(painting[request_id].result(), Finish)
        files = await files_of(bus, request_id)
        assert sorted(files) == [*range(params.n)]
        states = await steps_of(bus, request_id)
        for number, file in files.items():
            assert_painted(spec, file, (prompt, params), number)
            # Steps in the log are not computed again.
            assert [state.step for state in states if state.number == number] == [1, 2, 3]
        assert len({state.attempt for state in states}) >= 3
    await until_nothing_is_left(bus)


async def test_previews_in_a_stream_equal_the_decoded_predictions(
    processes: Processes, bus: Bus, api: AsyncOpenAI
) -> None:
    params = PaintParams("96x48", 1, 6, 3.0, "", 3, 5)
    more = {"seed": 3, "num_inference_steps": 6, "guidance_scale": 3.0}
    size: Any = params.size
    stream = await api.images.generate(
        model="flux", prompt=PROMPT, size=size, stream=True, partial_images=5, extra_body=more
    )
    files = []
    async for event in stream:
        files.append(base64.b64decode(event.b64_json))
        if len(files) in (1, 4):
            processes.kill("flux")
    model = load_image_model(processes.folder / "flux", "float64", SPECS["flux"].sizes, "the stage")
    steps = [*steps_alone(model, PROMPT, params)]
    shown = [*(step.preview for step in steps[:-1]), steps[-1].progress.latents]
    assert files == [to_png(model.pixels(x, parse_size(params.size))) for x in shown]
    await until_nothing_is_left(bus)


@pytest.mark.parametrize("code", ["cancelled", "deadline_exceeded"])
async def test_an_image_that_has_ended_is_left_within_one_step(
    processes: Processes, bus: Bus, code: str
) -> None:
    before = await metrics_of(processes, "flux")
    request = PROMPT, PaintParams("48x48", 1, 200, 1.0, "", 1)
    timeout_s = 3.0 if code == "deadline_exceeded" else 150.0
    order = await order_of(bus, SPECS["flux"], request, timeout_s=timeout_s)
    painting = asyncio.create_task(last_of(bus, code, order))
    await until(partial(have_steps, bus, code, step=2))
    if code == "cancelled":
        await client.cancel(bus, code)
    failure = await painting
    assert isinstance(failure, Failure)
    assert failure.error.code == code
    num_stored = len(await steps_of(bus, code))
    await until_nothing_is_left(bus)
    after = await metrics_of(processes, "flux")
    num_computed = after["pagemill_image_steps_total"] - before["pagemill_image_steps_total"]
    assert num_stored <= num_computed <= num_stored + 1
    assert num_stored < 100


EQUAL: dict[str, list[tuple[str, Request]]] = {
    "flux": [
        ("ann", (PROMPT, PaintParams("48x48", 2, 4, 3.0, "", 12))),
        ("bob", (PROMPT, PaintParams("48x48", 2, 4, 3.0, "", 12))),
        ("ann", (PROMPT, PaintParams("48x48", 2, 4, 3.0, "", 13))),
    ],
    "qwen_image_edit": [
        ("ann", (PROMPT, PaintParams("48x48", 1, 3, 3.0, "", 12, 0, (SQUARE,)))),
        ("bob", (PROMPT, PaintParams("48x48", 1, 3, 3.0, "", 12, 0, (SQUARE,)))),
        ("ann", (PROMPT, PaintParams("48x48", 1, 3, 3.0, "", 12, 0, (WIDE,)))),
    ],
}
"""Tenants and requests that do not share images."""


@pytest.mark.parametrize("name", EQUAL)
async def test_equal_requests_of_a_tenant_are_painted_once_by_two_generators(
    processes: Processes, bus: Bus, name: str
) -> None:
    spec, another = SPECS[name], processes.fork(name)
    try:
        await until(partial(have_generators, bus, Counter({name: 2})), 150)
        asking: dict[str, Awaitable[Any]] = {}
        for number, (tenant, request) in enumerate(EQUAL[name]):
            # Lanes share no images, and a tenant with many requests may be moved to the batch lane.
            order = await order_of(bus, spec, request, tenant, lane="batch")
            ids = [scoped_id(f"{name}-{number}-{n}", tenant) for n in range(6)]
            asking |= {id: last_of(bus, id, order) for id in ids}
        for finish in await asyncio.gather(*asking.values()):
            assert isinstance(finish, Finish)
        for number, (_, request) in enumerate(EQUAL[name]):
            ids = [id for id in asking if id.startswith(f"{name}-{number}-")]
            files = [await files_of(bus, id) for id in ids]
            assert len(files) == 6
            assert all(file == files[0] for file in files)
            assert len(files[0]) == request[1].n
            for image, file in files[0].items():
                assert_painted(spec, file, request, image)
            assert [bool(await steps_of(bus, id)) for id in ids].count(True) == 1
    finally:
        another.terminate()
    assert another.wait(10) == 0
    await until_nothing_is_left(bus)


async def test_a_step_that_kills_workers_is_a_dead_letter_and_takes_no_other_image_with_it(
    processes: Processes, bus: Bus
) -> None:
    spec = SPECS["flux"]
    requests = {
        "deadly": (PROMPT, PaintParams("48x48", 1, 6, DEADLY, "", 1)),
        **{f"well{n}": (PROMPT, PaintParams("48x48", 1, 6, 2.0, "", n)) for n in range(3)},
    }
    orders = {id: await order_of(bus, spec, request) for id, request in requests.items()}
    asking = [asyncio.create_task(last_of(bus, id, order)) for id, order in orders.items()]
    num_deaths = 0
    while not all(task.done() for task in asking):
        num_deaths += processes.restart_if_dead("flux")
        await asyncio.wait(asking, timeout=0.1)
    failure, *finishes = [task.result() for task in asking]
    assert isinstance(failure, Failure)
    assert failure.error.code == "poison"
    # The first death comes after a step of the request, so two others follow.
    assert num_deaths == 3
    letter = await bus.read_last(subjects.DEAD_STREAM, subjects.dead("dit", "deadly"))
    assert letter is not None
    assert decode_dead_letter(letter.data).request_id == "deadly"
    for request_id, finish in zip([*requests][1:], finishes, strict=True):
        assert isinstance(finish, Finish)
        assert_painted(spec, (await files_of(bus, request_id))[0], requests[request_id])
        assert [state.step for state in await steps_of(bus, request_id)] == [1, 2, 3, 4, 5]
    await until_nothing_is_left(bus)


async def test_the_metrics_of_the_stage_count_images_and_steps(
    processes: Processes, bus: Bus
) -> None:
    spec = SPECS["stable_diffusion_3"]
    before = await metrics_of(processes, spec.name)
    request = PROMPT, PaintParams("48x48", 3, 4, 3.0, "", 33)
    order = await order_of(bus, spec, request)
    for request_id in ("counted", "cached"):
        assert isinstance(await last_of(bus, request_id, order), Finish)
    await until_nothing_is_left(bus)
    after = await metrics_of(processes, spec.name)
    added = {
        name: after[f"pagemill_{name}"] - before.get(f"pagemill_{name}", 0.0)
        for name in (
            "image_steps_total",
            "image_cache_hits_total",
            "generator_waiting_units",
        )
    }
    assert added == {
        "image_steps_total": 12,
        "image_cache_hits_total": 1,
        "generator_waiting_units": 0,
    }


async def test_each_line_of_a_batch_has_its_image_although_workers_are_killed(
    processes: Processes, bus: Bus, api: AsyncOpenAI
) -> None:
    spec = SPECS["flux"]
    requests = [(PROMPT, PaintParams("48x48", 1, 4, 3.0, "", 100 + n)) for n in range(30)]
    bodies = [
        {
            "model": "flux",
            "prompt": prompt,
            "seed": params.seed,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
        }
        for prompt, params in requests
    ]
    path = "/v1/images/generations"
    batch = await begin(api, lines_of(path, bodies), endpoint=path)

    async def has_results() -> bool:
        counts = (await api.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed >= 5

    await until(has_results)
    for role in ("flux", "batcher"):
        processes.kill(role)
    batch = await ended(api, batch.id)
    assert batch.error_file_id is None, await results_of(api, batch.error_file_id)
    results = await results_of(api, batch.output_file_id)
    assert len(results) == 30
    for number, request in enumerate(requests):
        (image,) = results[f"line-{number}"]["response"]["body"]["data"]
        assert_painted(spec, base64.b64decode(image["b64_json"]), request)
    single: Any = await api.post("/images/generations", cast_to=object, body=bodies[-1])
    assert single["data"] == results["line-29"]["response"]["body"]["data"]
    await until_nothing_is_left(bus)
