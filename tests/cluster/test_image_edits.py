"""Edits of images by real processes: killed after steps, over HTTP, and from the command line.

    request ──▶ dit ══▶ text_encoder

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

from ops.browser import ENTER, MISSING, browsing
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.images import AUTO, ImageParams, PaintParams
from shared.protocol.names import scoped_id
from shared.protocol.records import Failure, Finish, ImageRecord, StepState
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from tests import preloaded
from tests.cluster.pages import choose
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.generator.pipelines import qwen_image_edit
from tests.generator.pipelines.input_images import FILES, SQUARE, TALL, WIDE, draw, file_of, url_of
from tests.generator.pipelines.spec import read_png, to_file
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.generator.diffusion.qwen_image_edit import QwenImageEdit

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = """
models:
  edit:
    path: edit
    dtype: float64
    stages: {dit: {sizes: [48x48, 96x48], sampling_defaults: {steps: 2}}, text_encoder: {}}
  painter: {path: painter, graph: qwen-image}
generator: {checkpoint_s: 0, threads: 1}
gateway: {port: 0}
delivery: {ack_wait_s: 1.0, drain_s: 5.0, retry_delay_s: 0.1}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "dit": ["generator", "--model", "edit", "--stage", "dit"],
    "text_encoder": ["generator", "--model", "edit", "--stage", "text_encoder"],
    "gateway": ["gateway"],
    "agent": ["agent"],
}
MODEL = "edit"
STEP_S = 0.2
"""Minimum time of a step, so that a worker can be killed between two steps."""
PROMPT = "turn the circle red"
FORM: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}


def register_roles() -> None:
    slow_down(QwenImageEdit, "step", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("image-edits")
    (folder / "pagemill.yaml").write_text(CONFIG)
    qwen_image_edit.write(folder / "edit")
    with running(folder, WORKERS, __name__) as started:
        yield started


def assert_edited(file: bytes, params: PaintParams, number: int = 0, prompt: str = PROMPT) -> None:
    whole = qwen_image_edit.paint_whole(prompt, params, number)
    np.testing.assert_array_equal(read_png(file), to_file(whole))


async def steps_of(bus: Bus, request_id: str) -> list[StepState]:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "image"))
    records = (decode_record(message.data) for message in stored)
    return [record for record in records if isinstance(record, StepState)]


async def test_the_generator_is_killed_after_each_step(processes: Processes, bus: Bus) -> None:
    url = await client.pin_media(bus, FILES[WIDE])
    options = ImageParams(None, 1, 3, 3.0, "ugly", 5, input_images=(url,))
    request = GenerateRequest(MODEL, prompt=PROMPT, image=options, timeout_s=150.0)

    async def ask() -> list[Any]:
        return [record async for record in client.ask(bus, request, "killed")]

    async def has_step(number: int) -> bool:
        return any(state.step >= number for state in await steps_of(bus, "killed"))

    editing = asyncio.create_task(ask())
    for number in (1, 2):
        await until(partial(has_step, number), 60)
        processes.kill("dit")
    (finish,) = await editing
    assert isinstance(finish, Finish)
    records = [record async for record in client.follow_output(bus, "killed", "image")]
    (image,) = [record for record in records if isinstance(record, ImageRecord)]
    assert (image.width, image.height) == (96, 32)
    params = PaintParams(AUTO, 1, 3, 3.0, "ugly", 5, 0, (url,))
    assert_edited(await client.read_media(bus, image.media), params)
    # Steps in the log are not computed again.
    assert [state.step for state in await steps_of(bus, "killed")] == [1, 2]
    await until_nothing_is_left(bus)


async def test_equal_edits_are_computed_once_for_each_tenant_and_image(bus: Bus) -> None:
    groups = {"a": ("ann", SQUARE), "b": ("bob", SQUARE), "c": ("ann", WIDE)}
    asking = []
    for name, (tenant, url) in groups.items():
        await client.pin_media(bus, FILES[url], tenant)
        options = ImageParams("48x48", 1, 2, 1.0, seed=9, input_images=(url,))
        # Lanes share no images, and a tenant with many requests may be moved to the batch lane.
        request = GenerateRequest(MODEL, prompt=PROMPT, image=options, lane="batch")
        asking += [last_of(bus, request, scoped_id(f"{name}{n}", tenant)) for n in range(3)]
    assert all(isinstance(last, Finish) for last in await asyncio.gather(*asking))
    for name, (tenant, url) in groups.items():
        ids = [scoped_id(f"{name}{n}", tenant) for n in range(3)]
        begun = [request_id for request_id in ids if await steps_of(bus, request_id)]
        assert len(begun) == 1
        for request_id in ids:
            records = [record async for record in client.follow_output(bus, request_id, "image")]
            (image,) = [record for record in records if isinstance(record, ImageRecord)]
            file = await client.read_media(bus, image.media, tenant)
            assert_edited(file, PaintParams("48x48", 1, 2, 1.0, "", 9, 0, (url,)))


async def last_of(bus: Bus, request: GenerateRequest, request_id: str) -> Any:
    return [record async for record in client.ask(bus, request, request_id)][-1]


async def test_the_client_of_openai_edits_images(api: AsyncOpenAI) -> None:
    more = {"seed": 2, "num_inference_steps": 2, "guidance_scale": 2.0}
    answers = [
        await api.images.edit(**FORM, image=image, n=2, extra_body=more)
        for image in (("a.png", FILES[SQUARE]), [FILES[SQUARE]], FILES[TALL])
    ]
    files = [[base64.b64decode(image.b64_json or "") for image in a.data or []] for a in answers]
    assert [str(answer.size) for answer in answers] == ["64x64", "64x64", "32x96"]
    assert files[0] == files[1]
    for number in (0, 1):
        assert_edited(files[0][number], PaintParams(AUTO, 2, 2, 2.0, "", 2, 0, (SQUARE,)), number)
        # Another image, with the same text and seed.
        assert_edited(files[2][number], PaintParams(AUTO, 2, 2, 2.0, "", 2, 0, (TALL,)), number)


async def test_stored_files_and_files_in_the_body_are_edited(api: AsyncOpenAI) -> None:
    stored = await api.files.create(file=("wide.png", FILES[WIDE]), purpose="vision")
    data_url = f"data:image/png;base64,{base64.b64encode(FILES[WIDE]).decode()}"
    body = FORM | {"size": "96x48", "seed": 6, "num_inference_steps": 2, "guidance_scale": 1}
    for image in ({"file_id": stored.id}, {"image_url": data_url}):
        answer: Any = await api.post(
            "/images/edits", cast_to=object, body=body | {"images": [image]}
        )
        file = base64.b64decode(answer["data"][0]["b64_json"])
        assert_edited(file, PaintParams("96x48", 1, 2, 1.0, "", 6, 0, (WIDE,)))


async def test_a_response_is_an_edited_image_and_the_next_one_edits_it(
    api: AsyncOpenAI, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools: Any = [{"type": "image_generation", "action": "edit"}]
    stored = await api.files.create(file=("wide.png", FILES[WIDE]), purpose="vision")
    parts: Any = [
        {"type": "input_image", "file_id": stored.id, "detail": "auto"},
        {"type": "input_text", "text": PROMPT},
    ]
    first = await api.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts}], tools=tools
    )
    second = await api.responses.create(
        model=MODEL, input=PROMPT, tools=tools, previous_response_id=first.id
    )
    source = WIDE
    for response in (first, second):
        (image,) = response.output
        assert image.type == "image_generation_call"
        assert (image.size, image.action) == ("96x32", "edit")
        records = client.follow_output(bus, f"{response.id}~i0-0", "image")
        (seed,) = [record.seed async for record in records if isinstance(record, ImageRecord)]
        file = base64.b64decode(image.result or "")
        assert_edited(file, PaintParams(AUTO, 1, 2, 4.0, "", seed, 0, (source,)))
        source = url_of(file)
        monkeypatch.setitem(FILES, source, file)


@pytest.mark.skipif(
    MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
)
async def test_the_page_edits_an_image(url: str, tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(FILES[WIDE])
    file = await asyncio.to_thread(edit_on_page, url, tmp_path)
    assert_edited(file, PaintParams(AUTO, 1, 2, 4.0, "", 3, 0, (WIDE,)))


def edit_on_page(url: str, folder: Path) -> bytes:
    """Edit an image on the page, which refuses a question without one. Return the file."""
    with browsing(folder) as page:
        page.open(f"{url}/")
        page.wait("!document.querySelector('#send').disabled")
        choose(page, MODEL)
        page.type("#paint-seed", "3")
        page.type("#question", PROMPT + ENTER)
        page.wait("document.querySelector('#notice').innerText.includes('edits one image, not 0')")
        page.type("#file", str(folder / "wide.png"))
        page.wait("document.querySelectorAll('#images li').length === 1")
        page.type("#question", ENTER)
        status = "document.querySelector('.turn .status')?.textContent"
        page.wait(f"{status}?.startsWith('Painted')", timeout_s=60)
        assert page.run("return document.querySelector('.turn .thumbs img').alt") == "wide.png"
        source = page.run("return document.querySelector('.painted').src")
        assert page.console_errors() == []
        return base64.b64decode(source.partition(",")[2])


async def test_previews_come_before_the_edited_image(api: AsyncOpenAI) -> None:
    stream = await api.images.edit(
        **FORM,
        image=FILES[SQUARE],
        stream=True,
        partial_images=1,
        extra_body={"seed": 3, "num_inference_steps": 2},
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert [str(event.size) for event in events] == ["auto", "64x64"]
    params = PaintParams(AUTO, 1, 2, 4.0, "", 3, 0, (SQUARE,))
    assert_edited(base64.b64decode(events[-1].b64_json), params)


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"image": b"hello"}, "image", "not a readable GIF, JPEG, PNG or WEBP image"),
        ({"image": FILES[WIDE][:-30]}, "image", "the image is damaged or incomplete"),
        ({"image": file_of(draw((404, 4)))}, "image", "an image of 404 x 4 is too narrow"),
        ({"image": [FILES[WIDE]] * 2}, "image", "the model edits one image, not 2"),
        ({"image": [FILES[WIDE]] * 17}, "image", "the model edits one image, not 17"),
        ({"mask": FILES[WIDE]}, "mask", "mask is not supported"),
        ({"model": "painter"}, "image", "image: the model edits no images"),
        ({"size": "64x64"}, "size", "available: 48x48, 96x48"),
        ({"prompt": "a <|image_pad|>"}, "prompt", "prompt: the text has <|image_pad|>"),
        ({"n": 11}, "n", "at most 10"),
    ],
)
async def test_what_cannot_be_edited_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await api.images.edit(**FORM | {"image": FILES[WIDE]} | changed)
    body: Any = refused.value.body
    assert refused.value.status_code in (400, 422)
    assert body["param"] == field
    assert message in body["message"]


async def test_a_model_that_edits_paints_nothing_without_an_image(
    api: AsyncOpenAI, bus: Bus
) -> None:
    with pytest.raises(openai.BadRequestError, match="edit only edits images: send them to"):
        await api.images.generate(**FORM)
    for options, message in (
        (None, "image.input_images: the model edits one image, not 0"),
        (ImageParams(input_images=("media:" + "0" * 64,)), "no file with this name is stored"),
    ):
        request = GenerateRequest(MODEL, prompt=PROMPT, image=options)
        request_id = client.new_request_id()
        (failure,) = [record async for record in client.ask(bus, request, request_id)]
        assert isinstance(failure, Failure)
        assert (failure.error.field or "").startswith("image.input_images")
        assert message in failure.error.message


async def test_the_command_line_edits_an_image(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(FILES[TALL])
    options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
    form = ["--steps", "2", "--seed", "4", "--guidance", "2", "--model", MODEL]
    files = [f'{PROMPT} @"{tmp_path / "in.png"}"', "-o", str(tmp_path / "out.png")]
    drawn = await asyncio.to_thread(preloaded.run, "draw", *files, *form, *options)
    assert drawn.returncode == 0, drawn.stderr
    params = PaintParams(AUTO, 1, 2, 2.0, "", 4, 0, (TALL,))
    assert_edited((tmp_path / "out.png").read_bytes(), params)
    missing = f"{PROMPT} @{tmp_path / 'no.png'}"
    refused = await asyncio.to_thread(preloaded.run, "draw", missing, *form, *options)
    assert "No such file" in " ".join(refused.stderr.split())
