"""From text to image by real processes: a generator paints, and is killed between its steps.

    request ──▶ dit

Every file equals the file of a plain loop over the same weights, byte for byte.
"""

import asyncio
import base64
import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from ops.browser import ENTER, MISSING, Browser, browsing
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.images import ImageParams, PaintParams
from shared.protocol.names import scoped_id, split_id
from shared.protocol.records import Failure, Finish, ImageRecord, StepState
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from shared.state.token_log import last_record
from tests import preloaded
from tests.cluster.pages import choose
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.gateway.batches.conftest import begin, ended, lines_of, results_of
from tests.generator import painters
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.generator.core.denoising import ImageModel
from workers.generator.painter_model import PainterModel, load_painter

DEMO_MODEL = Path(__file__).parents[2] / "ops" / "demo_model"
CONFIG = f"""
models:
  painter:
    path: painter
    dtype: float64
    stages:
      renderer: {{enabled: false}}
      engine: {{enabled: false}}
      dit:
        role: generator
        inputs: {{prompt: {{from: request, function: paint}}}}
        output: {{name: image, kind: image}}
        sizes: [16x16, 12x8]
        sampling_defaults: {{steps: 6, guidance: 3.0}}
  demo:
    path: {DEMO_MODEL}
generator: {{checkpoint_s: 0, threads: 1}}
gateway: {{port: 0}}
delivery: {{ack_wait_s: 1.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
# Workers of the model `demo` are not needed.
WORKERS = {
    "coordinator": ["coordinator"],
    "dit": ["generator", "--model", "painter"],
    "gateway": ["gateway"],
    "agent": ["agent"],
    "batcher": ["batcher"],
}
STEP_S = 0.1
"""Minimum time of a step, so that a worker can be killed between two steps."""
PROMPT = "a red circle on blue"
# Notes each image that the page shows.
WATCH_IMAGES = """
window.shown = [];
new MutationObserver(() => {
  const source = document.querySelector(".painted")?.src;
  if (source && window.shown.at(-1) !== source) window.shown.push(source);
}).observe(document.body, { subtree: true, childList: true, attributes: true });
"""


def register_roles() -> None:
    slow_down(PainterModel, "step", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("images")
    (folder / "pagemill.yaml").write_text(CONFIG)
    painters.write(folder / "painter")
    with running(folder, WORKERS, __name__) as started:
        yield started


@pytest.fixture(scope="module")
def painter(processes: Processes) -> ImageModel:
    return load_painter(processes.folder / "painter", "float64", ["16x16"], "the stage")


async def steps_of(bus: Bus, request_id: str) -> list[StepState]:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "image"))
    records = (decode_record(message.data) for message in stored)
    return [record for record in records if isinstance(record, StepState)]


@pytest.mark.long
async def test_the_generator_is_killed_between_the_steps_of_an_image(
    processes: Processes, bus: Bus, painter: ImageModel
) -> None:
    options = ImageParams(steps=8, seed=5, negative_prompt="a star")
    request = GenerateRequest("painter", prompt=PROMPT, image=options)

    async def own() -> list[Any]:
        return [record async for record in client.ask(bus, request, "killed")]

    async def has_steps(number: int) -> bool:
        return len(await steps_of(bus, "killed")) >= number

    painting = asyncio.create_task(own())
    for number in (2, 5):
        await until(partial(has_steps, number))
        processes.kill("dit")
    (finish,) = await painting
    assert isinstance(finish, Finish)
    assert {span.stage for span in finish.path} == {"coordinator", "dit"}
    records = [record async for record in client.follow_output(bus, "killed", "image")]
    (image,) = (record for record in records if isinstance(record, ImageRecord))
    params = PaintParams("16x16", 1, 8, 3.0, "a star", 5)
    alone = painters.painted_alone(PROMPT, params, model=painter)
    assert await client.read_media(bus, image.media) == alone
    # Steps in the log are not computed again.
    states = await steps_of(bus, "killed")
    assert [state.step for state in states] == [1, 2, 3, 4, 5, 6, 7]
    assert len({state.attempt for state in states}) == 3
    await until_nothing_is_left(bus)


def painting_of(seed: int, steps: int = 6) -> GenerateRequest:
    return GenerateRequest("painter", prompt=PROMPT, image=ImageParams(seed=seed, steps=steps))


async def painted(bus: Bus, request_id: str, request: GenerateRequest) -> bytes:
    """The file of a request's image."""
    records = [record async for record in client.ask(bus, request, request_id)]
    assert isinstance(records[-1], Finish)
    written = [record async for record in client.follow_output(bus, request_id, "image")]
    (image,) = (record for record in written if isinstance(record, ImageRecord))
    return await client.read_media(bus, image.media, split_id(request_id)[1])


async def test_equal_requests_are_painted_once_for_each_tenant(
    processes: Processes, bus: Bus, painter: ImageModel
) -> None:
    more = [processes.fork("dit") for _ in range(2)]
    try:

        async def are_three() -> bool:
            return [beat.role for beat in await bus.heartbeats.read()].count("generator") == 3

        await until(are_three, 150)
        # Lanes share no images, and a tenant with many requests may be moved to the batch lane.
        request = replace(painting_of(12), lane="batch")
        tenants = ["ann"] * 20 + ["bob"] * 10
        ids = [scoped_id(f"same{n}", tenant) for n, tenant in enumerate(tenants)]
        files = await asyncio.gather(*(painted(bus, id, request) for id in ids))
        params = PaintParams("16x16", 1, 6, 3.0, "", 12)
        assert set(files) == {painters.painted_alone(PROMPT, params, model=painter)}
        # Each step is in the log of the request that it was computed for.
        begun = [n for n, id in enumerate(ids) if await steps_of(bus, id)]
        assert len(begun) == 2
        assert [n < 20 for n in begun] == [True, False]
        # Nor is it painted again later, and another seed is another image.
        assert await painted(bus, "later@ann", request) == files[0]
        assert await painted(bus, "other@ann", painting_of(13)) != files[0]
        assert not await steps_of(bus, "later@ann")
        assert await steps_of(bus, "other@ann")
    finally:
        for process in more:
            process.terminate()
    for process in more:
        assert process.wait(10) == 0
    await until_nothing_is_left(bus)


async def test_a_request_that_waits_paints_when_the_one_before_is_cancelled(
    bus: Bus, painter: ImageModel
) -> None:
    request = painting_of(14, steps=20)

    async def first() -> Any:
        return [record async for record in client.ask(bus, request, "first")][-1]

    async def has_begun() -> bool:
        return bool(await steps_of(bus, "first"))

    painting = asyncio.create_task(first())
    await until(has_begun)
    second = asyncio.create_task(painted(bus, "second", request))
    await asyncio.sleep(5 * STEP_S)
    assert not await steps_of(bus, "second")
    await client.cancel(bus, "first")
    assert isinstance(await painting, Failure)
    params = PaintParams("16x16", 1, 20, 3.0, "", 14)
    assert await second == painters.painted_alone(PROMPT, params, model=painter)
    await until_nothing_is_left(bus)


# -- over HTTP, and from the command line ---------------------------------------------------------


async def test_the_official_client_has_images_painted(
    api: AsyncOpenAI, url: str, painter: ImageModel
) -> None:
    params = PaintParams("12x8", 2, 4, 3.0, "", 7)
    right = [painters.painted_alone(PROMPT, params, number, painter) for number in range(2)]
    more = {"seed": 7, "num_inference_steps": 4}
    form: Any = {"model": "painter", "prompt": PROMPT, "n": 2, "size": "12x8"}
    whole, by_url = await asyncio.gather(
        api.images.generate(**form, extra_body=more),
        api.images.generate(**form, response_format="url", extra_body=more),
    )
    assert [base64.b64decode(image.b64_json or "") for image in whole.data or []] == right
    assert (whole.size, whole.output_format) == ("12x8", "png")
    assert whole.usage is not None
    assert whole.usage.input_tokens == painter.check_text(PROMPT, "")
    async with httpx.AsyncClient(trust_env=False) as http:
        for image, file in zip(by_url.data or [], right, strict=True):
            assert image.url is not None
            assert image.url.startswith(f"{url}/v1/images/")
            answer = await http.get(image.url)
            assert (answer.headers["content-type"], answer.content) == ("image/png", file)
        for name in ("0" * 64, "x"):
            assert (await http.get(f"{url}/v1/images/{name}")).status_code == 404


async def test_an_image_sharpens_in_a_stream(api: AsyncOpenAI, painter: ImageModel) -> None:
    stream = await api.images.generate(
        model="painter",
        prompt=PROMPT,
        stream=True,
        partial_images=2,
        extra_body={"seed": 3, "guidance_scale": 1.0},
    )
    *previews, last = [event async for event in stream]
    assert [event.type for event in previews] == ["image_generation.partial_image"] * 2
    assert [getattr(event, "partial_image_index", None) for event in previews] == [0, 1]
    assert last.type == "image_generation.completed"
    alone = painters.painted_alone(PROMPT, PaintParams("16x16", 1, 6, 1.0, "", 3), model=painter)
    assert base64.b64decode(last.b64_json) == alone
    assert len({event.b64_json for event in (*previews, last)}) == 3


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"size": "17x16"}, "size", "available: 16x16, 12x8"),
        ({"n": 11}, "n", "at most 10"),
        ({"output_format": "jpeg"}, "output_format", "available: png"),
        ({"response_format": "file"}, "response_format", "available: b64_json, url"),
        ({"response_format": "url", "stream": True}, "response_format", "available: b64_json"),
        ({"partial_images": 2}, "partial_images", "require stream"),
        ({"num_inference_steps": 201}, "num_inference_steps", "at most 200"),
        ({"quality": "high"}, "quality", "not supported"),
        ({"guidance_scale": 1, "negative_prompt": "red"}, "negative_prompt", "^negative_prompt: "),
        ({"prompt": "red " * 20}, "prompt", "limit of 12"),
        ({"negative_prompt": "red " * 20}, "negative_prompt", "^negative_prompt: the text has"),
        ({"model": "demo"}, "model", "demo paints no images"),
        ({"model": "none"}, "model", "no model"),
    ],
)
async def test_what_cannot_be_painted_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str, message: str
) -> None:
    form: Any = {"model": "painter", "prompt": PROMPT} | changed
    with pytest.raises(openai.APIStatusError) as refused:
        await api.post("/images/generations", cast_to=object, body=form)
    assert refused.value.status_code == (404 if changed.get("model") == "none" else 400)
    body: Any = refused.value.body
    assert body["param"] == field
    assert re.search(message, body["message"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_cancels_its_image(bus: Bus, url: str, is_stream: bool) -> None:
    body = {"model": "painter", "prompt": PROMPT, "num_inference_steps": 200, "stream": is_stream}
    before = set(await steps_by_request(bus))
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        asking = asyncio.create_task(http.post(f"{url}/v1/images/generations", json=body))

        async def new() -> set[str]:
            return set(await steps_by_request(bus)) - before

        (request_id,) = await until(new)
        asking.cancel()

    final = await until(partial(last_record, bus, request_id))
    assert isinstance(final, Failure)
    assert final.error.code == "cancelled"
    await until_nothing_is_left(bus)
    assert len(await steps_of(bus, request_id)) < 150


@pytest.mark.skipif(
    MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
)
@pytest.mark.timeout(180)
async def test_the_page_shows_an_image_as_it_sharpens(
    url: str, painter: ImageModel, tmp_path: Path
) -> None:
    alone = painters.painted_alone(PROMPT, PaintParams("16x16", 1, 9, 3.0, "", 11), model=painter)
    await asyncio.to_thread(check_page, url, tmp_path, base64.b64encode(alone).decode())


def check_page(url: str, folder: Path, image: str) -> None:
    with browsing(folder) as page:
        page.open(f"{url}/")
        page.wait("!document.querySelector('#send').disabled")
        choose(page, "painter")
        fields = "[...document.querySelectorAll('#painting label')].map((l) => l.innerText)"
        assert page.run(f"return {fields}") == [
            "Size", "Images", "Steps", "Guidance", "Seed", "Negative prompt",
        ]  # fmt: skip
        defaults = page.run(
            "return [...document.querySelectorAll('#painting input')].map((i) => i.placeholder)"
        )
        assert defaults == ["16x16", "1", "6", "3", "random", ""]
        assert page.run("return document.querySelector('#temperature').checkVisibility()") is False
        page.type("#paint-seed", "11")
        page.type("#paint-steps", "9")
        page.run(WATCH_IMAGES)
        page.type("#question", PROMPT + ENTER)
        page.wait(
            "document.querySelector('.turn .status')?.textContent.startsWith('Painted')",
            timeout_s=60,
        )
        urls: list[str] = page.run("return window.shown")
        assert len(urls) == len(set(urls)) == 7
        assert urls[-1] == f"data:image/png;base64,{image}"
        assert page.run("return document.querySelector('.painted').naturalWidth") == 16
        # A reload continues with the image.
        page.run("document.querySelector('#more').value = arguments[0]", '{"timeout_s": 50}')
        page.run("document.querySelector('#paint-seed').value = ''")
        page.type("#question", PROMPT + ENTER)
        page.wait("document.querySelector('.turn:last-child .painted') !== null")
        page.run("location.reload()")
        page.wait(
            "document.querySelector('.turn:last-child .status')?.textContent.startsWith('Painted')",
            timeout_s=60,
        )
        assert page.run("return document.querySelectorAll('.painted').length") == 2
        # Stop cancels an image, and the next question may come.
        choose(page, "painter")
        page.type("#paint-steps", "80")
        page.type("#question", PROMPT + ENTER)
        page.wait("document.querySelector('.turn:last-child .painted') !== null")
        page.run("document.querySelector('#cancel').click()")
        page.wait("document.querySelector('.turn:last-child .status').textContent === 'Cancelled'")
        assert page.console_errors() == []
        check_fields(page)


def check_fields(page: Browser) -> None:
    """Wrong values are refused next to their fields, and a retry shows several images in order."""
    fault = "document.querySelector('#fault-paint-{}')?.textContent"
    page.run("document.querySelector('#paint-steps').value = ''")
    page.type("#paint-n", "12")
    page.run("document.querySelector('#question').value = ''")
    page.type("#question", PROMPT + ENTER)
    page.wait(f"{fault.format('n')} !== undefined")
    turns = page.run("return document.querySelectorAll('.turn').length")
    page.run("document.querySelector('#paint-n').value = '2'")
    page.type("#paint-size", "99x99")
    page.type("#question", ENTER)
    page.wait(f"{fault.format('size')}?.includes('available: 16x16, 12x8')")
    assert page.run("return document.activeElement.id") == "paint-size"
    page.run("document.querySelector('#paint-size').value = '12x8'")
    page.run("document.querySelector('.turn:last-child .retry').click()")
    done = "document.querySelector('.turn:last-child .status')?.textContent.startsWith('Painted')"
    page.wait(done, timeout_s=60)
    assert page.run(f"return {fault.format('size')}") is None
    sizes = "[...document.querySelectorAll('.turn:last-child .painted')].map((i) => i.naturalWidth)"
    assert page.run(f"return {sizes}") == [12, 12]
    assert page.run("return document.querySelectorAll('.turn').length") == turns + 1


async def steps_by_request(bus: Bus) -> list[str]:
    """Return the ids of requests with at least one step of an image."""
    stored = await bus.read(subjects.TOKENS_STREAM, "pm.tokens.*.image")
    return [message.subject.split(".")[2] for message in stored]


async def test_the_command_line_saves_images(
    processes: Processes, bus: Bus, painter: ImageModel, tmp_path: Path
) -> None:
    options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
    form = ["--steps", "3", "--seed", "4", "--guidance", "2", "--negative", "a star", "--n", "2"]
    file = tmp_path / "out.png"
    drawn = await asyncio.to_thread(
        preloaded.run, "draw", PROMPT, "-o", str(file), "--request-id", "drawn", *form, *options
    )
    assert drawn.returncode == 0, drawn.stderr
    params = PaintParams("16x16", 2, 3, 2.0, "a star", 4)
    for number in range(2):
        alone = painters.painted_alone(PROMPT, params, number, painter)
        assert (tmp_path / f"out-{number + 1}.png").read_bytes() == alone
    assert "16 x 16 pixels, seed 4" in drawn.stderr
    where = await asyncio.to_thread(preloaded.run, "where", "drawn", *options)
    assert "dit" in where.stdout
    for more, message in (
        (["--model", "demo"], "demo has no output of images"),
        (["--size", "1x1"], "available: 16x16, 12x8"),
        (["--steps", "0"], "steps"),
        (["-o", str(tmp_path)], "Is a directory"),
    ):
        refused = await asyncio.to_thread(preloaded.run, "draw", PROMPT, *more, *options)
        assert refused.returncode == 1
        assert message in " ".join(refused.stderr.split())
    assert "request req-" not in refused.stderr, "the file is checked before the request is sent"


# -- as responses ---------------------------------------------------------------------------------


async def test_a_response_of_a_painter_is_its_image_although_workers_are_killed(
    processes: Processes, bus: Bus, api: AsyncOpenAI, painter: ImageModel
) -> None:
    tool: Any = {"type": "image_generation", "size": "12x8", "partial_images": 2}
    form: Any = {"model": "painter", "input": PROMPT, "tools": [tool]}
    begun = await api.responses.create(**form, background=True)
    request_id = f"{begun.id}~i0-0"
    for number, role in ((1, "agent"), (3, "dit"), (4, "agent")):

        async def has_steps(least: int = number) -> bool:
            return len(await steps_of(bus, request_id)) >= least

        await until(has_steps)
        processes.kill(role)
    events = [event async for event in await api.responses.retrieve(begun.id, stream=True)]
    stored = await api.responses.retrieve(begun.id)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "queued", "in_progress", "output_item.added",
        "image_generation_call.in_progress", "image_generation_call.generating",
        *["image_generation_call.partial_image"] * 2,
        "image_generation_call.completed", "output_item.done", "completed",
    ]  # fmt: skip
    assert stored == getattr(events[-1], "response", None)
    (image,) = stored.output
    assert image.type == "image_generation_call"
    # Without a seed the noise is made of the request's id.
    records = [record async for record in client.follow_output(bus, request_id, "image")]
    (painted,) = (record for record in records if isinstance(record, ImageRecord))
    params = PaintParams("12x8", 1, 6, 3.0, "", painted.seed)
    alone = painters.painted_alone(PROMPT, params, model=painter)
    assert base64.b64decode(image.result or "") == alone
    # No step was computed again.
    states = await steps_of(bus, request_id)
    assert [state.step for state in states] == [1, 2, 3, 4, 5]
    await until_nothing_is_left(bus)


async def test_a_response_of_a_painter_is_cancelled_and_refused(
    bus: Bus, api: AsyncOpenAI, painter: ImageModel
) -> None:
    form: Any = {"model": "painter", "input": PROMPT, "tools": [{"type": "image_generation"}]}
    begun = await api.responses.create(**form, background=True)

    async def has_begun() -> bool:
        return bool(await steps_of(bus, f"{begun.id}~i0-0"))

    await until(has_begun)
    cancelled = await api.responses.cancel(begun.id)
    (image,) = cancelled.output
    assert (cancelled.status, image.type) == ("cancelled", "image_generation_call")
    assert getattr(image, "status", None) == "failed"
    await until_nothing_is_left(bus)
    for changes, field in (
        ({"input": "red " * 20}, "input"),
        ({"instructions": "Be brief."}, "instructions"),
        ({"temperature": 0.5}, "temperature"),
        ({"tools": []}, "model"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "input",
        ),
        ({"tool_choice": "none"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**form | changes)
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError):
        await api.responses.input_tokens.count(model="painter", input="a")


# -- at another gateway ----------------------------------------------------------------------------


async def test_images_and_responses_are_the_results_of_a_batch(api: AsyncOpenAI, url: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "painter", "prompt": PROMPT, "seed": seed, "size": "16x16"} for seed in (3, 4)
    ]
    path = "/v1/images/generations"
    files = [*bodies, bodies[0] | {"response_format": "url"}]
    batch = await ended(api, (await begin(api, lines_of(path, files), endpoint=path)).id)
    results = await results_of(api, batch.output_file_id)
    direct = [
        await api.images.generate(
            model="painter", prompt=PROMPT, size="16x16", extra_body={"seed": body["seed"]}
        )
        for body in bodies
    ]
    images = [results[f"line-{n}"]["response"]["body"]["data"] for n in range(3)]
    painted = [(answer.data or [])[0].b64_json for answer in direct]
    assert [image["b64_json"] for (image,) in images[:2]] == painted
    ((named,),) = images[2:]
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        file = await http.get(named["url"])
    assert base64.b64encode(file.content).decode() == painted[0]

    body = {"model": "painter", "input": PROMPT, "tools": [{"type": "image_generation"}]}
    orders: list[dict[str, Any]] = [body, body | {"background": True}]
    path = "/v1/responses"
    batch = await ended(api, (await begin(api, lines_of(path, orders), endpoint=path)).id)
    assert batch.errors is not None
    assert [error.param for error in batch.errors.data or []] == ["body.background"]
    batch = await ended(api, (await begin(api, lines_of(path, [body]), endpoint=path)).id)
    (result,) = (await results_of(api, batch.output_file_id)).values()
    response = result["response"]["body"]
    assert [item["type"] for item in response["output"]] == ["image_generation_call"]
    assert (await api.responses.retrieve(response["id"])).status == "completed"


async def test_an_image_continues_at_another_gateway(
    processes: Processes, bus: Bus, url: str, painter: ImageModel
) -> None:
    """The gateway is killed between the previews. Its client comes back at another one."""
    form = {"model": "painter", "prompt": PROMPT, "seed": 21, "num_inference_steps": 12}
    streamed = form | {"stream": True, "partial_images": 5}
    events = {"accept": "text/event-stream", "x-request-id": "streamed"}
    named = {"x-request-id": "named"}
    path = "/v1/images/generations"
    before = {beat.url for beat in await bus.heartbeats.read()}
    dying = processes.fork("gateway")

    async def new_url() -> list[str]:
        urls = [beat.url for beat in await bus.heartbeats.read() if beat.role == "gateway"]
        return [address for address in urls if address is not None and address not in before]

    (other,) = await until(new_url, 150)
    text = ""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        whole = asyncio.create_task(http.post(f"{other}{path}", json=form, headers=named))
        with contextlib.suppress(httpx.HTTPError):
            async with http.stream(
                "POST", f"{other}{path}", json=streamed, headers=events
            ) as stream:
                async for line in stream.aiter_lines():
                    text += f"{line}\n"
                    if text.count("\n\n") == 2:
                        dying.kill()
        assert "completed" not in text
        with pytest.raises(httpx.HTTPError):
            await whole
        *_, last = re.findall("^id: (.*)$", text, re.MULTILINE)
        rest = await http.post(
            f"{url}{path}", json=streamed, headers=events | {"last-event-id": last}
        )
        again = await http.post(f"{url}{path}", json=form, headers=named)
        other_seed = await http.post(f"{url}{path}", json=form | {"seed": 22}, headers=named)
        state = await http.get(f"{url}/v1/requests/named")
    alone = painters.painted_alone(PROMPT, PaintParams("16x16", 1, 12, 3.0, "", 21), model=painter)
    file = base64.b64encode(alone).decode()
    text += rest.text
    names = re.findall("^event: image_generation.(.*)$", text, re.MULTILINE)
    assert names == ["partial_image"] * 5 + ["completed"]
    numbers = re.findall('"partial_image_index":([0-9])', text)
    assert numbers == ["0", "1", "2", "3", "4"]
    assert text.count(file) == 1
    assert text.endswith("data: [DONE]\n\n")
    assert again.json()["data"] == [{"b64_json": file}]
    assert other_seed.status_code == 422
    assert (state.json()["state"], state.json()["result"]) == ("finished", again.json())
    # Nothing was painted for a second time.
    for request_id in (rest.headers["x-request-id"], again.headers["x-request-id"]):
        assert {step.attempt for step in await steps_of(bus, request_id)} <= {1}
