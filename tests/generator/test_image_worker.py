"""The generator of images on a real broker, with a small painter of random weights in float64."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, GeneratorConfig, ModelConfig, StageConfig
from shared.errors import Cancelled
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.images import PaintParams
from shared.protocol.messages import AttemptRecord
from shared.protocol.records import Failure, ImageRecord, OutputEnd, StepState
from shared.protocol.task_messages import PaintBody, TaskHeader
from shared.stage.runtime import Context
from shared.state import media_store, output_ends
from shared.state.log_records import decode_record
from shared.state.token_log import LogWriter, end_request
from tests.generator.painters import WatchedPainter, painted_alone
from tests.shared.stage.test_worker_loop import accept, put, settled
from tests.support.waiting import until
from workers.generator.image_results import ImageResults, key_of
from workers.generator.image_thread import ImageThread
from workers.generator.image_worker import ImageWorker

STAGES: dict[str, dict[str, Any]] = {
    "renderer": {"enabled": False},
    "engine": {"enabled": False},
    "dit": {
        "role": "generator",
        "inputs": {"prompt": {"from": "request", "function": "paint"}},
        "output": {"name": "image", "kind": "image"},
        "sizes": ["16x16", "8x12"],
    },
}


@contextlib.asynccontextmanager
async def serving(
    bus: Bus,
    model: str,
    painter: WatchedPainter,
    *,
    batch: int = 4,
    checkpoint_s: float = 1e9,
    max_tasks: int = 64,
    results: ImageResults | None = None,
) -> AsyncIterator[Context]:
    """Run a worker until the end of the block. The test may stop it earlier."""
    config = Config(
        {model: ModelConfig("nowhere", stages=msgspec.convert(STAGES, dict[str, StageConfig]))},
        delivery=DeliveryConfig(ack_wait_s=5.0, drain_s=5.0),
        generator=GeneratorConfig(checkpoint_s=checkpoint_s, max_tasks=max_tasks),
    )
    name, log = f"generator-{secrets.token_hex(4)}", structlog.get_logger()
    context = Context("generator", name, model, config, bus, log)
    thread = ImageThread(painter, batch)
    worker = ImageWorker(context, model, thread, painter, "weights", results)
    running = asyncio.create_task(worker.serve())
    try:
        yield context
    finally:
        painter.may_go_on.release(1000)
        context.shutdown.begin()
        await running
        await context.close()


async def publish_request(
    bus: Bus, model: str, prompt: str, params: PaintParams, lane: str = "interactive"
) -> TaskHeader:
    """Publish the task of a request for images, and return its header."""
    request_id = f"t-{secrets.token_hex(6)}"
    ticket = await accept(bus, model, request_id)
    await output_ends.begin(bus, request_id, ["image"])
    header = TaskHeader(request_id, model, lane, ticket, outputs=["image"], image=params)
    await put(bus, "dit", header, PaintBody(prompt))
    return header


async def records_of(bus: Bus, header: TaskHeader) -> list[Any]:
    subject = subjects.tokens(header.request_id, "image")
    return [decode_record(m.data) for m in await bus.read(subjects.TOKENS_STREAM, subject)]


async def file_of(bus: Bus, media: str) -> bytes | None:
    name = media_store.parse_media_url(media)
    assert name is not None
    return await media_store.find(bus, name, 2**20)


async def images_of(bus: Bus, header: TaskHeader) -> dict[int, bytes | None]:
    """The files of a request's images, by their numbers, each once."""
    records = [r for r in await records_of(bus, header) if isinstance(r, ImageRecord)]
    assert len({image.number for image in records}) == len(records)
    return {image.number: await file_of(bus, image.media) for image in records}


async def began(painter: WatchedPainter) -> None:
    assert await asyncio.to_thread(painter.began.acquire, timeout=20)


REQUESTS = [
    ("red", PaintParams("16x16", 1, 9, 2.5, "", 1)),
    ("blue", PaintParams("16x16", 3, 5, 4.0, "red", 2)),
    ("a cross", PaintParams("8x12", 2, 7, 1.0, "", 3)),
    ("a heart", PaintParams("16x16", 1, 12, 1.0, "", 4)),
    ("stars", PaintParams("8x12", 1, 4, 3.0, "", 42, 2)),
    ("stars", PaintParams("8x12", 1, 4, 3.0, "", 42)),
    ("circles", PaintParams("16x16", 2, 3, 0.0, "green", 5)),
    ("last", PaintParams("16x16", 1, 6, 2.5, "", 2**63 - 1)),
]


async def test_images_that_join_and_leave_a_batch_equal_those_painted_alone(
    bus: Bus, model: str
) -> None:
    painter = WatchedPainter(gated=True)
    async with serving(bus, model, painter):
        headers = []
        for prompt, params in REQUESTS:
            headers.append(await publish_request(bus, model, prompt, params))
            await began(painter)
            painter.may_go_on.release()
        painter.may_go_on.release(1000)
        for header in headers:
            await settled(bus, header)
        answers = [await images_of(bus, header) for header in headers]
        *_, preview, _, _ = await records_of(bus, headers[4])
        previews = [r for r in await records_of(bus, headers[4]) if isinstance(r, StepState)]
        assert await file_of(bus, preview.preview) is not None
    for (prompt, params), images in zip(REQUESTS, answers, strict=True):
        assert images == {n: painted_alone(prompt, params, n) for n in range(params.n)}
    assert answers[4] == answers[5]
    # Requests and images share encoded texts. Without guidance, there is no negative text.
    prompts = ["red", "blue", "a cross", "a heart", "stars", "circles", "last"]
    assert sorted(painter.encoded) == sorted([*prompts, "", "green"])
    assert [(state.step, state.state) for state in previews] == [(1, ""), (2, "")]
    # Images at different steps shared a batch, and none had more than its limit.
    assert any(len(set(times)) > 1 for times in painter.batches)
    assert max(map(len, painter.batches)) == 4
    end = (await records_of(bus, headers[1]))[-1]
    assert isinstance(end, OutputEnd)
    assert end.summary.units == {"images": 3, "steps": 15, "prompt_tokens": 4}


@pytest.mark.parametrize("n", [1, 2])
async def test_no_step_is_done_of_an_image_whose_request_has_ended(
    bus: Bus, model: str, n: int
) -> None:
    painter = WatchedPainter(gated=True)
    async with serving(bus, model, painter, batch=1):
        header = await publish_request(bus, model, "red", PaintParams("16x16", n, 50, seed=1))
        await began(painter)
        await end_request(bus, header.request_id, 1, Cancelled("cancelled"), [])
        await bus.notify(subjects.ended(header.request_id))
        await asyncio.sleep(0.2)
        painter.may_go_on.release()
        other = await publish_request(bus, model, "blue", PaintParams("16x16", 1, 1, seed=1))
        painter.may_go_on.release(100)
        await settled(bus, header)
        await settled(bus, other)
    assert painter.batches == [[0.0], [0.0]]


async def test_the_interactive_lane_goes_before_the_steps_of_the_batch_lane(
    bus: Bus, model: str
) -> None:
    painter = WatchedPainter(gated=True)
    async with serving(bus, model, painter, batch=1):
        slow = await publish_request(bus, model, "red", PaintParams("16x16", 1, 4, seed=1), "batch")
        await began(painter)
        soon = await publish_request(bus, model, "blue", PaintParams("16x16", 1, 5, seed=1))
        await asyncio.sleep(0.3)
        painter.may_go_on.release(100)
        await settled(bus, soon)
        await settled(bus, slow)
        assert await images_of(bus, slow) == {
            0: painted_alone("red", PaintParams("16x16", 1, 4, seed=1))
        }
    assert painter.batches == [[0.0], *([n / 5] for n in range(5)), *([n / 4] for n in (1, 2, 3))]


@pytest.mark.parametrize("checkpoint_s", [0.0, 1e9])
async def test_a_worker_that_stops_leaves_its_latents_to_another_one(
    bus: Bus, model: str, checkpoint_s: float
) -> None:
    params = PaintParams("16x16", 1, 6, seed=9)
    stopping = WatchedPainter(gated=True)
    async with serving(bus, model, stopping, checkpoint_s=checkpoint_s) as context:
        header = await publish_request(bus, model, "red", params)
        for _ in range(3):
            await began(stopping)
            stopping.may_go_on.release()
        await began(stopping)
        context.shutdown.begin()
    states = [record.step for record in await records_of(bus, header)]
    assert states == ([1, 2, 3, 4] if checkpoint_s == 0 else [4])
    next_one = WatchedPainter()
    async with serving(bus, model, next_one):
        await settled(bus, header)
    assert next_one.batches == [[4 / 6], [5 / 6]]
    assert await images_of(bus, header) == {0: painted_alone("red", params)}


async def test_a_request_that_waits_for_an_equal_one_leaves_it_a_place(
    bus: Bus, model: str
) -> None:
    """Else none of them is painted when the worker stops that has claimed the images."""
    params, results = PaintParams("16x16", 1, 3, seed=9), ImageResults(bus, 600.0)
    stopping, full = WatchedPainter(gated=True), WatchedPainter()
    async with serving(bus, model, stopping, max_tasks=1, results=results) as first:
        painting = await publish_request(bus, model, "red", params)
        await began(stopping)
        async with serving(bus, model, full, max_tasks=1, results=results):
            waiting = await publish_request(bus, model, "red", params)
            attempts = subjects.ATTEMPTS_STREAM, subjects.attempts(waiting.request_id)
            await until(lambda: bus.read_last(*attempts))
            first.shutdown.begin()
            stopping.may_go_on.release(1000)
            for header in (painting, waiting):
                await settled(bus, header)
            answers = [await images_of(bus, header) for header in (painting, waiting)]
    assert answers == 2 * [{0: painted_alone("red", params)}]


async def test_a_suspect_that_waits_for_an_equal_one_lets_it_have_its_turn(
    bus: Bus, model: str
) -> None:
    """A worker has died with both, and the one that has claimed the images comes again later."""
    params, results = PaintParams("16x16", 1, 3, seed=9), ImageResults(bus, 600.0)
    painter = WatchedPainter()
    headers: list[TaskHeader] = []
    queue = subjects.stage_consumer("dit", model, "interactive")
    where = subjects.stage_filter("dit", model, "interactive")
    inbox = await bus.queues.consume(subjects.STAGES_STREAM, queue, where, 1, 5.0)
    for pause_s in (2.0, 0.0):
        header = await publish_request(bus, model, "red", params)
        died = AttemptRecord("dit", "generator-dead", 1, bus.now_ms(), 0, model=model)
        await bus.publish_without_id(subjects.attempts(header.request_id), to_json(died))
        await (await inbox.next()).retry(pause_s)
        if not headers:
            key = key_of("weights", header, "red")
            assert key is not None
            await results.find_or_claim(key, header.request_id, lambda: None)
        headers.append(header)
    await inbox.stop()
    async with serving(bus, model, painter, results=results):
        for header in headers:
            await settled(bus, header)
        answers = [await images_of(bus, header) for header in headers]
    assert answers == 2 * [{0: painted_alone("red", params)}]


async def test_an_image_without_stored_latents_begins_again(bus: Bus, model: str) -> None:
    params = PaintParams("16x16", 1, 3, seed=9)
    painter = WatchedPainter()
    header = await publish_request(bus, model, "red", params)
    log = await LogWriter.open(bus, header.request_id, 1, "image")
    await log.step(0, 2, 3, state=media_store.media_url("0" * 64))
    async with serving(bus, model, painter):
        await settled(bus, header)
        assert await images_of(bus, header) == {0: painted_alone("red", params)}
    assert len(painter.batches) == 3


@pytest.mark.parametrize(
    ("prompt", "negative", "field"),
    [("a prompt too long", "", "prompt"), ("red", "too long as well", "image.negative_prompt")],
)
async def test_a_text_that_the_painter_does_not_read_is_refused(
    bus: Bus, model: str, prompt: str, negative: str, field: str
) -> None:
    painter = WatchedPainter()
    async with serving(bus, model, painter):
        params = PaintParams("16x16", negative_prompt=negative)
        header = await publish_request(bus, model, prompt, params)
        await settled(bus, header)
    # The event loop has other requests to attend to.
    assert threading.main_thread() not in painter.reading_threads
    (final,) = await read_log(bus, header.request_id)
    assert isinstance(final, Failure)
    assert (final.error.code, final.error.field) == ("context_length_exceeded", field)
    assert final.error.message.endswith("over the painter's limit of 12")


class DistilledPainter(WatchedPainter):
    """A painter without guidance and negative prompts."""

    empty_negative = None
    no_guidance = 0.0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (PaintParams("16x16", guidance=2.0), "image.guidance"),
        (PaintParams("16x16", guidance=0.0, negative_prompt="red"), "image.negative_prompt"),
    ],
)
async def test_what_has_no_effect_in_a_model_is_refused(
    bus: Bus, model: str, params: PaintParams, field: str
) -> None:
    painter = DistilledPainter()
    async with serving(bus, model, painter):
        refused = await publish_request(bus, model, "red", params)
        params = PaintParams("16x16", steps=2, guidance=0.0)
        painted = await publish_request(bus, model, "red", params)
        await settled(bus, refused)
        await settled(bus, painted)
        assert len(await images_of(bus, painted)) == 1
    (final,) = await read_log(bus, refused.request_id)
    assert isinstance(final, Failure)
    assert (final.error.code, final.error.field) == ("invalid_request", field)
