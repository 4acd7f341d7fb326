"""Videos in a renderer: what their decoders do harms no other request."""

import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.helpers.forking import Forks
from shared.protocol import subjects
from shared.protocol.multimodal import VIDEO
from shared.protocol.records import ErrorInfo, Failure
from shared.protocol.requests import (
    DocumentPart,
    DocumentURL,
    Message,
    TextPart,
    VideoPart,
    VideoURL,
)
from tests.renderer.decoding import files
from tests.renderer.rig import (
    Sink,
    config_for,
    messages_with,
    new_model,
    publish,
    renderer,
    task_for,
)
from tests.support.documents import letters
from tests.support.media import data_url, png
from tests.support.waiting import until
from workers.renderer.decoding import pool as pools
from workers.renderer.worker import RendererWorker

SEQUENCE = files.sequence([files.jpeg(files.picture(number)) for number in range(4)])


def image_url() -> str:
    return data_url(png())


class Rig:
    """A renderer with the spawner that a test names, and the queues on both sides of it."""

    def __init__(self, bus: Bus, model: str, worker: RendererWorker, sink: Sink) -> None:
        self.bus = bus
        self.model = model
        self.worker = worker
        self.sink = sink

    async def send(self, url: str) -> str:
        """Ask about a video, and return the request's id."""
        messages = [Message("user", [VideoPart(VideoURL(url)), TextPart("What moves?")])]
        task = task_for(self.bus, self.model, messages)
        await publish(self.bus, task)
        return task.header.request_id

    async def send_image(self) -> None:
        await publish(self.bus, task_for(self.bus, self.model, messages_with([image_url()])))

    async def error(self, request_id: str) -> ErrorInfo:
        records = [record async for record in client.follow(self.bus, request_id)]
        assert isinstance(records[-1], Failure)
        assert await self.bus.read_last(subjects.DEAD_STREAM, subjects.dead_of(request_id)) is None
        return records[-1].error


@pytest.fixture
def spawner() -> str:
    return pools.SPAWNER


@pytest.fixture
def decoder_jobs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The jobs for which a decoder was started."""
    jobs: list[object] = []
    fork = Forks.fork

    def note(self: Forks, message: bytes, descriptors: Sequence[int]) -> socket.socket:
        jobs.append(message)
        return fork(self, message, descriptors)

    monkeypatch.setattr(Forks, "fork", note)
    return jobs


@pytest.fixture
async def rig(
    broker: EmbeddedServer, bus: Bus, spawner: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(pools, "SPAWNER", spawner)
    model = new_model()
    sink = await Sink.open(bus, model)
    async with renderer(broker.url, config_for(model, decoder_cpu_s=1)) as worker:
        yield Rig(bus, model, worker, sink)


async def test_a_hundred_requests_with_one_video_decode_it_once(
    rig: Rig, decoder_jobs: list[object]
) -> None:
    for _ in range(100):
        await rig.send(SEQUENCE.decode())
    bodies = [(await rig.sink.next())[0] for _ in range(100)]
    assert len(decoder_jobs) == 1
    assert {item.modality for body in bodies for item in body.items} == {VIDEO}
    assert len({item.mm_hash for body in bodies for item in body.items}) == 1


@pytest.mark.parametrize("spawner", ["tests.renderer.decoding.dying"])
async def test_a_hundred_requests_with_one_bomb_cost_one_decoder(
    rig: Rig, decoder_jobs: list[object]
) -> None:
    url = data_url(b"abort")
    errors = [await rig.error(id) for id in [await rig.send(url) for _ in range(100)]]
    assert {(error.code, error.field) for error in errors} == {
        ("invalid_media", "messages[0].content[0].video_url.url")
    }
    assert "signal 6" in errors[0].message
    assert len(decoder_jobs) == 1
    await rig.send_image()
    await rig.sink.next()


@pytest.mark.parametrize("spawner", ["tests.renderer.decoding.dying"])
async def test_images_do_not_wait_for_videos(rig: Rig, decoder_jobs: list[object]) -> None:
    """All decoders are busy until the renderer ends, and more videos wait for them."""
    for number in range(4):
        await rig.send(data_url(b"sleep:%d" % number))
    await until(lambda: len(decoder_jobs) >= 2)
    for _ in range(3):
        await rig.send_image()
        await rig.sink.next()
    assert len(decoder_jobs) == 2


@pytest.mark.parametrize("spawner", ["tests.renderer.decoding.dying"])
async def test_images_do_not_wait_for_documents(rig: Rig, decoder_jobs: list[object]) -> None:
    """All decoders are busy until the renderer ends, and more documents wait for them."""
    for texts in ("A", "B", "C", "D"):
        part = DocumentPart(DocumentURL(data_url(letters(texts))))
        await publish(rig.bus, task_for(rig.bus, rig.model, [Message("user", [part])]))
    await until(lambda: len(decoder_jobs) >= 2)
    for _ in range(3):
        await rig.send_image()
        await rig.sink.next()
    assert len(decoder_jobs) == 2


@pytest.mark.parametrize("spawner", ["tests.renderer.decoding.hiding"])
async def test_without_the_extra_its_name_is_in_the_error(rig: Rig) -> None:
    error = await rig.error(await rig.send(data_url(files.video())))
    assert error.code == "unsupported_content"
    assert "pagemill[video]" in error.message
    await rig.send(SEQUENCE.decode())
    body, _ = await rig.sink.next()
    assert [item.modality for item in body.items] == [VIDEO]


async def test_a_video_of_a_codec_reaches_the_engine(rig: Rig) -> None:
    items = []
    for codec, container in (("libx264", "mp4"), ("libvpx-vp9", "webm")):
        await rig.send(data_url(files.video(codec, container)))
        body, _ = await rig.sink.next()
        items += body.items
    assert [item.modality for item in items] == [VIDEO, VIDEO]
    assert items[0].placeholder.length == items[1].placeholder.length > 0
    assert items[0].mm_hash != items[1].mm_hash
