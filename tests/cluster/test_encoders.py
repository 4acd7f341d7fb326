"""Engines without a tower: encoders make the embeddings, once each, and may die at any moment."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.client import ask, new_request_id
from shared.config.schema import ModelConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import IMAGE, embedding_key
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.requests import GenerateRequest, VideoURL
from shared.stage.runtime import EXIT_CONFIG
from shared.state.token_log import last_record
from tests import preloaded
from tests.cluster.conftest import CONFIG, Cluster, answer, living, start_cluster, stop_cluster
from tests.cluster.streams import assert_gapless, text_of, tokens_of
from tests.cluster.test_request import CASES
from tests.cluster.test_videos import clip, data_url, expected_tokens, frames_of, question
from tests.support.waiting import until
from workers.cli.ask import build_request
from workers.renderer.media.image_decoder import hash_source
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

WITH_ENCODERS = CONFIG.replace("max_model_len: 1024", "max_model_len: 1024\n    tower: encoder")


def start_with_encoders(folder: Path, text: str, num_more: int) -> Iterator[Cluster]:
    running = start_cluster(folder, text)
    more = []
    for _ in range(num_more):
        with running.log.open("ab") as stderr:
            command = ["worker", "encoder", "--config", str(running.config), "--nats", running.url]
            more.append(preloaded.start(command, cwd=folder, stderr=stderr))
    yield running
    for process in more:
        process.terminate()
        process.wait(10)
    stop_cluster(running)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Everything once, and three encoders."""
    yield from start_with_encoders(tmp_path_factory.mktemp("encoders"), WITH_ENCODERS, 2)


@pytest.fixture
async def client(three: Cluster) -> AsyncIterator[Bus]:
    bus = await Bus.connect(three.url, "test")
    # `pagemill up` keeps one of them alive.
    await until(lambda: encoders_live(bus, 1))
    yield bus
    await bus.close()


async def encoders_live(bus: Bus, count: int) -> bool:
    return len(await living(bus, "encoder")) >= count


def about(image: str, text: str = "What color is this image?") -> GenerateRequest:
    return build_request("demo", text, [IMAGES / image], {})


def about_a_new_image(folder: Path, size: tuple[int, int], colour: str) -> GenerateRequest:
    Image.new("RGB", size, colour).save(folder / "new.png")
    return about(str(folder / "new.png"))


def events(cluster: Cluster, event: str) -> list[dict[str, object]]:
    # The last line may not be written whole yet.
    lines = cluster.log.read_text().splitlines(keepends=True)
    logged = [json.loads(line) for line in lines if line.startswith("{") and line[-1] == "\n"]
    return [entry for entry in logged if entry["event"] == event]


@contextlib.contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def test_a_video_is_encoded_once_and_answered_as_by_transformers(client: Bus) -> None:
    """Its embeddings come from an encoder, for all requests with the same frames of it."""
    num_before = sum([beat.load["encoded"] for beat in await living(client, "encoder")])
    videos = [VideoURL(data_url(clip(8, shift=5)), fps=fps) for fps in (2.0, 2.0, 1.0)]
    answers = [await answer(client, question(video)) for video in videos]
    expected = [expected_tokens(frames_of(8, shift=5), another, False) for another in videos[1:]]
    assert [tokens_of(records) for records in answers] == [expected[0], *expected]

    async def are_two() -> bool:
        beats = await living(client, "encoder")
        return sum([beat.load["encoded"] for beat in beats]) == num_before + 2

    await until(are_two)


async def test_answers_are_right_and_every_image_went_through_an_encoder(
    three: Cluster, client: Bus
) -> None:
    await until(lambda: encoders_live(client, 3))
    num_before = len(events(three, "encoded"))
    requests = [
        build_request("demo", case.question, [IMAGES / i for i in case.images], {})
        for case in CASES
    ]
    answers = await asyncio.gather(*(answer(client, request) for request in requests))
    for case, records in zip(CASES, answers, strict=True):
        assert_gapless(records)
        assert case.expect.lower() in text_of(records).lower()
        check_path(records[-1], bool(case.images))
    num_images = len({i for case in CASES for i in case.images})
    assert len(events(three, "encoded")) == num_before + num_images


def check_path(final: LogRecord, encoded: bool) -> None:
    """A request with images waited for them between its renderer and its answer."""
    assert isinstance(final, Finish)
    roles = ["coordinator", "renderer", *["encoder"] * encoded, "engine"]
    assert [hop.stage for hop in final.path] == roles
    if encoded:
        waited, answered = final.path[-2:]
        assert answered.received_ms <= waited.received_ms <= waited.sent_ms <= answered.sent_ms
        assert waited.attempt == answered.attempt


async def test_a_hundred_requests_with_one_image_make_one_encode(
    three: Cluster, client: Bus, tmp_path: Path
) -> None:
    request = about_a_new_image(tmp_path, (200, 120), "red")
    before = len(events(three, "encoded"))
    answers = await asyncio.gather(*(answer(client, request) for _ in range(100)))
    for records in answers:
        assert_gapless(records)
        assert "red" in text_of(records).lower()
    assert len(events(three, "encoded")) - before == 1


async def test_no_request_can_end_an_encode_task_by_its_name(
    three: Cluster, client: Bus, tmp_path: Path
) -> None:
    """A client that has the file of an image can compute the name of its task."""
    request = about_a_new_image(tmp_path, (112, 112), "teal")
    processor = Processor(ModelConfig(str(DEMO_MODEL)))
    source = hash_source((tmp_path / "new.png").read_bytes())
    key = embedding_key("demo", processor.hash_media(IMAGE, source, ""))
    for name in (key, subjects.item_task(key)):
        await client.publish_without_id(subjects.cancel(name), b"")
        bad = GenerateRequest("nobodys", request.messages)
        await client.publish_without_id(subjects.request("demo", name), to_json(bad))
    await until(lambda: nothing_queued(client, subjects.CANCELS_STREAM))
    assert await last_record(client, key) is not None, "it is a request's name like any other"
    assert isinstance((await answer(client, request))[-1], Finish)


async def nothing_queued(bus: Bus, stream: str) -> bool:
    first, last = await bus.figures.sequence_range(stream)
    return first > last


async def test_an_encoder_killed_while_it_encodes_an_image(
    three: Cluster, client: Bus, tmp_path: Path
) -> None:
    request = about_a_new_image(tmp_path, (120, 200), "blue")
    before = len(events(three, "encoded"))
    pids = [beat.pid for beat in await living(client, "encoder")]
    with frozen(pids):
        running = [asyncio.create_task(answer(client, request)) for _ in range(10)]
        await until(lambda: _in_hand(client))
        # Whoever of them has it dies with it; the one that is left does it.
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
    for records in await asyncio.gather(*running):
        assert_gapless(records)
        assert isinstance(records[-1], Finish)
        assert "blue" in text_of(records).lower()
    assert len(events(three, "encoded")) - before == 1


async def _in_hand(bus: Bus) -> bool:
    durable = subjects.stage_consumer("encoder", "demo", "interactive")
    return (await bus.figures.depth(subjects.STAGES_STREAM, durable)).num_in_flight > 0


async def test_embeddings_that_are_lost_are_made_again(
    three: Cluster, client: Bus, tmp_path: Path
) -> None:
    request = about_a_new_image(tmp_path, (90, 90), "yellow")
    # An encoder of the test before may still be at work, and its result is another image's.
    await until(lambda: nothing_queued(client, subjects.STAGES_STREAM))
    before = len(events(three, "encoded"))
    await client.purge(subjects.RESULTS_STREAM, subjects.RESULTS_FILTER)
    with frozen([await three.pid(client, "engine")]):
        running = asyncio.create_task(answer(client, request))
        await until(lambda: _is_encoded(client))
        for beat in await living(client, "encoder"):
            os.kill(beat.pid, signal.SIGKILL)
    records = await running
    assert_gapless(records)
    final = records[-1]
    assert isinstance(final, Finish)
    assert "yellow" in text_of(records).lower()
    roles = [hop.stage for hop in final.path]
    assert roles == ["coordinator", "renderer", "engine", "renderer", "encoder", "engine"]
    assert len(events(three, "encoded")) - before == 2


async def _is_encoded(bus: Bus) -> bool:
    """Whether a result is there, and no encoder has a task, which would make another one."""
    filters = [subjects.stage_filter("encoder", "demo", lane) for lane in subjects.LANES]
    if any([await bus.figures.subjects_of(subjects.STAGES_STREAM, subject) for subject in filters]):
        return False
    return await bus.read_last(subjects.RESULTS_STREAM, subjects.RESULTS_FILTER) is not None


async def test_without_encoders_the_deadline_holds_and_text_continues(
    three: Cluster, client: Bus, tmp_path: Path
) -> None:
    request = about_a_new_image(tmp_path, (64, 200), "green")
    request = msgspec.structs.replace(request, timeout_s=3.0)
    with frozen([beat.pid for beat in await living(client, "encoder")]):
        running = asyncio.create_task(_collect(client, request))
        text = await answer(client, build_request("demo", "What can you do?", [], {}))
        assert isinstance(text[-1], Finish)
        records = await running
    final = records[-1]
    assert isinstance(final, Failure)
    assert final.error.code == "deadline_exceeded"

    async def let_go() -> bool:
        (engine,) = await living(client, "engine")
        return not engine.load["opening"] and not engine.load["held"]

    await until(let_go)


async def _collect(bus: Bus, request: GenerateRequest) -> list[LogRecord]:
    return [record async for record in ask(bus, request, new_request_id())]


async def test_a_shared_directory_outlives_its_encoder(tmp_path: Path) -> None:
    store = tmp_path / "embeddings"
    text = WITH_ENCODERS + f"embeddings: {{storage: directory, path: {store}}}\n"
    for cluster in start_with_encoders(tmp_path, text, 0):
        bus = await Bus.connect(cluster.url, "test")
        for words in ("What color is this image?", "What color is it?"):
            records = await answer(bus, about("red.png", words))
            assert "red" in text_of(records).lower()
        (file,) = store.glob("demo/*/encoder_cache.safetensors")
        assert (file.parent / "acknowledged").exists()
        # The addresses of the embeddings are gone, and so is the encoder that made them.
        await bus.purge(subjects.RESULTS_STREAM, subjects.RESULTS_FILTER)
        os.kill(await cluster.pid(bus, "encoder"), signal.SIGKILL)
        records = await answer(bus, about("red.png"))
        assert isinstance(records[-1], Finish)
        assert "red" in text_of(records).lower()
        assert len(events(cluster, "encoded")) == 1
        await bus.close()


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(
    broker: EmbeddedServer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = tmp_path / "pagemill.yaml"
    text = f"embeddings: {{storage: directory, path: {tmp_path / 'file'}}}\n"
    config.write_text(WITH_ENCODERS + text)
    command = ["worker", "encoder", "--config", str(config), "--nats", broker.url]
    done = preloaded.run(*command, cwd=tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert "embeddings.path" in done.stderr
    assert "Traceback" not in done.stderr


async def test_engines_with_towers_share_what_they_make(tmp_path: Path) -> None:
    store = tmp_path / "embeddings"
    text = CONFIG.replace("max_model_len: 1024", "max_model_len: 1024\n    share_embeddings: true")
    text += f"embeddings: {{storage: directory, path: {store}}}\n"
    for cluster in start_with_encoders(tmp_path, text, 0):
        bus = await Bus.connect(cluster.url, "test")
        assert "red" in text_of(await answer(bus, about("red.png"))).lower()
        first = await cluster.pid(bus, "engine")
        await until(lambda bus=bus: _has_encoded(bus, 1))  # type: ignore[misc]
        await until(lambda: _exists(store))
        os.kill(first, signal.SIGKILL)
        assert "red" in text_of(await answer(bus, about("red.png"))).lower()
        assert await cluster.pid(bus, "engine") != first
        await until(lambda bus=bus: _has_encoded(bus, 0))  # type: ignore[misc]
        await bus.close()


async def _has_encoded(bus: Bus, count: int) -> bool:
    """The one living engine, since its last answer."""
    return any(
        beat.load["encoded_items"] == count and beat.load["prefix_query_tokens"] > 0
        for beat in await living(bus, "engine")
    )


async def _exists(store: Path) -> bool:
    return any(store.glob("demo/*/encoder_cache.safetensors"))  # noqa: ASYNC240
