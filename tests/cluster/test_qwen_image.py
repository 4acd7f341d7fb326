"""Qwen-Image by real processes: killed after each step, over HTTP, and from the command line.

    request ──▶ dit
    dit ══▶ text_encoder
    dit ══▶ vae

In float64, each file equals the pixels of diffusers' own pipeline with the same noise.
"""

import asyncio
import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from rich.filesize import decimal

from ops.harness import qwen_images
from shared import client
from shared.bus.bus import Bus
from shared.models.image_folder import read_image_folder
from shared.protocol import subjects
from shared.protocol.images import ImageParams, PaintParams
from shared.protocol.messages import decode_attempt
from shared.protocol.records import Failure, Finish, ImageRecord, StepState
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from tests import preloaded
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.generator.pipelines import qwen_image
from tests.generator.pipelines.spec import read_png, to_file
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.generator.diffusion.qwen_image import QwenImage

CONFIG = """
models:
  qwen-image:
    path: qwen-image
    dtype: float64
    stages: {dit: {sizes: [48x48, 96x48, 48x96]}, text_encoder: {}, vae: {}}
generator: {checkpoint_s: 0, threads: 1}
gateway: {port: 0}
delivery: {ack_wait_s: 1.0, drain_s: 5.0, retry_delay_s: 0.1}
"""
PARTS = {"dit": "transformer", "text_encoder": "text_encoder", "vae": "vae"}
"""Part of the model that each stage loads."""
WORKERS = {
    "coordinator": ["coordinator"],
    **{stage: ["generator", "--model", "qwen-image", "--stage", stage] for stage in PARTS},
    "gateway": ["gateway"],
}
MODEL = "qwen-image"
STEP_S = 0.2
"""Minimum time of the work of a stage, so that its worker can be killed in the middle."""
PROMPT = "a red circle on blue"


def register_roles() -> None:
    for method in ("encode", "step", "pixels"):
        slow_down(QwenImage, method, STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("qwen-image")
    (folder / "pagemill.yaml").write_text(CONFIG)
    qwen_images.write(folder / "qwen-image")
    with running(folder, WORKERS, __name__) as started:
        yield started


def assert_painted(file: bytes, prompt: str, params: PaintParams, number: int = 0) -> None:
    np.testing.assert_array_equal(
        read_png(file), to_file(qwen_image.paint_whole(prompt, params, number))
    )


async def steps_of(bus: Bus, request_id: str) -> list[StepState]:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "image"))
    records = (decode_record(message.data) for message in stored)
    return [record for record in records if isinstance(record, StepState)]


async def test_the_generator_is_killed_after_each_step_of_two_images(
    processes: Processes, bus: Bus
) -> None:
    params = PaintParams("48x48", 2, 4, 3.0, "ugly", 5)
    options = ImageParams("48x48", 2, 4, 3.0, "ugly", 5)
    request = GenerateRequest(MODEL, prompt=PROMPT, image=options, timeout_s=150.0)

    async def own() -> list[Any]:
        return [record async for record in client.ask(bus, request, "killed")]

    async def has_step(number: int) -> bool:
        return any(state.step >= number for state in await steps_of(bus, "killed"))

    painting = asyncio.create_task(own())
    for number in range(1, params.steps):
        await until(partial(has_step, number), 60)
        processes.kill("dit")
    (finish,) = await painting
    assert isinstance(finish, Finish)
    records = [record async for record in client.follow_output(bus, "killed", "image")]
    images = [record for record in records if isinstance(record, ImageRecord)]
    assert sorted(image.number for image in images) == [0, 1]
    for image in images:
        assert_painted(await client.read_media(bus, image.media), PROMPT, params, image.number)
    states = await steps_of(bus, "killed")
    # Steps in the log are not computed again.
    for number in range(params.n):
        assert [s.step for s in states if s.number == number] == [1, 2, 3]
    assert len({state.attempt for state in states}) >= 3
    await until_nothing_is_left(bus)


async def test_each_stage_is_killed_while_a_request_needs_it(
    processes: Processes, bus: Bus
) -> None:
    # No other test has this text, so it has to be encoded.
    prompt = "a small green star"
    params = PaintParams("48x48", 1, 3, 3.0, "ugly", 6)
    options = ImageParams("48x48", 1, 3, 3.0, "ugly", 6)
    request = GenerateRequest(MODEL, prompt=prompt, image=options, timeout_s=150.0)

    async def own() -> list[Any]:
        return [record async for record in client.ask(bus, request, "stages")]

    async def has_step() -> bool:
        return bool(await steps_of(bus, "stages"))

    painting = asyncio.create_task(own())
    await until(partial(has_item, bus, "text_encoder"), 60)
    processes.kill("text_encoder")
    await until(has_step, 60)
    # The encoded texts are lost with their worker, and the next worker of the steps needs them.
    processes.kill("text_encoder")
    processes.kill("dit")
    await until(partial(has_item, bus, "vae"), 60)
    processes.kill("vae")
    (finish,) = await painting
    assert isinstance(finish, Finish)
    records = [record async for record in client.follow_output(bus, "stages", "image")]
    (image,) = [record for record in records if isinstance(record, ImageRecord)]
    assert_painted(await client.read_media(bus, image.media), prompt, params)
    assert [state.step for state in await steps_of(bus, "stages")] == [1, 2]
    await until_nothing_is_left(bus)


async def test_a_request_does_not_wait_for_a_stage_beyond_its_deadline(
    processes: Processes, bus: Bus
) -> None:
    options = ImageParams("48x48", 1, 3, 1.0, None, 7)
    request = GenerateRequest(MODEL, prompt="a late star", image=options, timeout_s=2.0)
    with processes.stopped("text_encoder"):
        (failure,) = [record async for record in client.ask(bus, request, "late")]
    assert isinstance(failure, Failure)
    assert failure.error.code == "deadline_exceeded"
    # The task that no request needs any more is removed.
    await until_nothing_is_left(bus)
    assert not await steps_of(bus, "late")


async def has_item(bus: Bus, stage: str) -> bool:
    """Return whether a worker of a stage has claimed an item task."""
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.ATTEMPTS_FILTER)
    attempts = [decode_attempt(message.data) for message in stored]
    return any(attempt is not None and attempt.stage == stage for attempt in attempts)


async def test_the_call_with_the_names_of_diffusers_is_answered(api: AsyncOpenAI) -> None:
    body = {
        "model": "qwen-image",
        "prompt": "...",
        "seed": 42,
        "cfg_scale": 4.0,
        "num_images_per_prompt": 1,
        "num_inference_steps": 5,
        "height": 48,
        "width": 96,
    }
    answers: list[Any] = [
        await api.post("/images/generations", cast_to=object, body=form)
        for form in (body, body | {"true_cfg_scale": 4, "size": "96x48", "n": 1})
    ]
    files = [base64.b64decode(answer["data"][0]["b64_json"]) for answer in answers]
    assert files[0] == files[1]
    assert_painted(files[0], "...", PaintParams("96x48", 1, 5, 4.0, "", 42))


async def test_requests_of_other_steps_texts_and_guidance_share_batches(api: AsyncOpenAI) -> None:
    requests = [
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("two blue cats on a long table", PaintParams("48x48", 2, 6, 2.0, "", 2)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
    ]

    async def paint(prompt: str, params: PaintParams) -> list[bytes]:
        more: dict[str, Any] = {
            "seed": params.seed,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
        }
        if params.negative_prompt:
            more["negative_prompt"] = params.negative_prompt
        size: Any = params.size
        answer = await api.images.generate(
            model=MODEL, prompt=prompt, n=params.n, size=size, extra_body=more
        )
        return [base64.b64decode(image.b64_json or "") for image in answer.data or []]

    answers = await asyncio.gather(*(paint(*request) for request in requests))
    for (prompt, params), files in zip(requests, answers, strict=True):
        for number, file in enumerate(files):
            assert_painted(file, prompt, params, number)


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"height": 48, "width": 64}, "width", "64x48' is not available; available: 48x48, 96x48"),
        ({"prompt": "a" * 1100}, "prompt", "over the model's limit of 1024"),
        ({"negative_prompt": "a" * 1100}, "negative_prompt", "over the model's limit of 1024"),
        ({"cfg_scale": 0.5}, "cfg_scale", "cfg_scale: 0.5 is less than 1, with which this model"),
        (
            {"cfg_scale": 1, "negative_prompt": "x"},
            "negative_prompt",
            "with a guidance of 1; remove",
        ),
        ({"cfg_scale": 2, "guidance_scale": 3}, "cfg_scale", "2.0 contradicts guidance_scale, 3.0"),
        ({"num_inference_steps": 0}, "num_inference_steps", "at least 1"),
        ({"cfg_scale": 51}, "cfg_scale", "at most 50"),
    ],
)
async def test_what_cannot_be_painted_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.post(
            "/images/generations",
            cast_to=object,
            body={"model": MODEL, "prompt": PROMPT} | changed,
        )
    body: Any = refused.value.body
    assert body["param"] == field
    assert message in body["message"]


async def test_a_preview_comes_before_the_image(api: AsyncOpenAI) -> None:
    stream = await api.images.generate(
        model=MODEL,
        prompt=PROMPT,
        stream=True,
        partial_images=2,
        extra_body={"seed": 3, "num_inference_steps": 4},
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    files = [base64.b64decode(event.b64_json) for event in events]
    assert_painted(files[-1], PROMPT, PaintParams("48x48", 1, 4, 4.0, "", 3))
    distances = [
        np.abs(read_png(file).astype(int) - read_png(files[-1]).astype(int)).mean()
        for file in files
    ]
    assert distances[0] > distances[1] > distances[2] == 0


async def test_the_command_line_draws_checks_and_lists_the_model(
    processes: Processes, tmp_path: Path
) -> None:
    options = ["--config", str(processes.folder / "pagemill.yaml")]
    form = ["--steps", "3", "--seed", "4", "--guidance", "2", "--negative", "a star"]
    file = tmp_path / "out.png"
    drawn = await asyncio.to_thread(
        preloaded.run, "draw", PROMPT, "-o", str(file), *form, *options, "--nats", processes.url
    )
    assert drawn.returncode == 0, drawn.stderr
    assert_painted(file.read_bytes(), PROMPT, PaintParams("48x48", 1, 3, 2.0, "a star", 4))
    checked = await asyncio.to_thread(preloaded.run, "check", *options)
    assert checked.returncode == 0, checked.stderr
    folder = read_image_folder(processes.folder / "qwen-image")
    sizes = [
        f"{stage} {decimal(folder.num_bytes(part, 'float64'))}" for stage, part in PARTS.items()
    ]
    (line, *graph) = [line for line in checked.stdout.splitlines() if line.startswith("# ")]
    line_of_memory = f"weights in memory: {', '.join(sizes)} as float64"
    assert line == f"# models.qwen-image.path: qwen-image (diffusers); {line_of_memory}"
    assert graph[1:] == [
        "#   request ──▶ dit  (task: prompt)",
        "#   dit ══▶ text_encoder  (fan-out: texts)",
        "#   dit ══▶ vae  (fan-out: latents)",
        "#   dit ──▷ output image (image)",
    ]
    listed = await asyncio.to_thread(preloaded.run, "models", *options, "--nats", processes.url)
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("qwen-image")]
    assert line.split()[1:3] == ["qwen-image", "diffusers"]
    assert line.endswith("served")
