"""A retry uses the same images as the first attempt, even if their URLs have changed."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec.structs import replace
from nats.js import JetStreamContext

from ops.token_logs import read_log
from shared import client
from shared.bus import bus as bus_module
from shared.bus import reading
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import Config
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.multimodal import IMAGE
from shared.protocol.records import Failure
from shared.state import media_store
from tests import preloaded
from tests.renderer.canary import Canary, send
from tests.renderer.rig import Sink, config_for, messages_with, publish, renderer, task_for
from tests.renderer.threads import in_thread
from tests.support.media import png
from workers.renderer.media.loader import MediaLoader
from workers.renderer.media.request_media import RequestMedia

ROOT = Path(__file__).parents[3]


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    server.answers = {"/a.png": send(png(1)), "/b.png": send(png(2))}
    yield server
    server.close()


@pytest.fixture
async def sink(bus: Bus, model: str) -> Sink:
    return await Sink.open(bus, model)


async def hashes_of(
    bus: Bus, url: str, config: Config, sink: Sink, files: list[bytes]
) -> list[str]:
    """mm_hash of each of `files`, as a renderer makes them of images in the request itself."""
    (model,) = config.models
    urls = [await client.pin_media(bus, data) for data in files]
    async with renderer(url, config):
        await publish(bus, task_for(bus, model, messages_with(urls)))
        task, _ = await sink.next()
    return [item.mm_hash for item in task.items]


async def test_a_renderer_killed_between_fetch_and_hand_over(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str, canary: Canary, tmp_path: Path
) -> None:
    """One URL serves another image by then, the other one nothing any more."""
    config = config_for(model)
    expected = await hashes_of(bus, broker.url, config, sink, [png(1), png(2)])
    file = tmp_path / "pagemill.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(config)))
    dying = await asyncio.create_subprocess_exec(
        *preloaded.PYTHON,
        "-m",
        "tests.renderer.dying",
        str(file),
        broker.url,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    task = task_for(bus, model, messages_with([canary.url("/a.png"), canary.url("/b.png")]))
    await publish(bus, task)
    assert await asyncio.wait_for(dying.wait(), 60) == -signal.SIGKILL
    canary.answers = {"/a.png": send(png(3)), "/b.png": send(b"gone", 404)}
    before = len(canary.paths)
    async with renderer(broker.url, config):
        forwarded, _ = await sink.next_task()
    assert forwarded.header.path[-1].attempt > 1
    assert [item.mm_hash for item in forwarded.body.items] == expected
    assert len(canary.paths) == before == 2


async def test_rendered_again_for_the_engine(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str, canary: Canary
) -> None:
    task = task_for(bus, model, messages_with([canary.url("/a.png")]))
    async with renderer(broker.url, config_for(model)):
        await publish(bus, task)
        first, _ = await sink.next()
    canary.answers["/a.png"] = send(png(3))
    # Another process, which has not fetched it.
    async with renderer(broker.url, config_for(model)):
        again = replace(task.header, round=1)
        await publish(bus, replace(task, header=again))
        second, _ = await sink.next_task()
        await publish(bus, task_for(bus, model, task.body.prompt.messages))
        other, _ = await sink.next()
    assert second.header.round == 1
    assert second.body.items[0].mm_hash == first.items[0].mm_hash
    assert other.items[0].mm_hash != first.items[0].mm_hash, (
        "another request sees what is there now"
    )


async def test_files_that_the_store_has_lost_are_fetched_again(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str, canary: Canary
) -> None:
    task = task_for(bus, model, messages_with([canary.url("/a.png")]))
    async with renderer(broker.url, config_for(model)):
        await publish(bus, task)
        first, _ = await sink.next()
    await bus.purge(subjects.MEDIA_STREAM, subjects.MEDIA_FILTER)
    async with renderer(broker.url, config_for(model)):
        await publish(bus, replace(task, header=replace(task.header, round=1)))
        second, _ = await sink.next()
    assert second.items[0].mm_hash == first.items[0].mm_hash
    assert len(canary.paths) == 2


async def test_without_a_store_nothing_is_handed_over(
    broker: EmbeddedServer,
    bus: Bus,
    sink: Sink,
    model: str,
    canary: Canary,
    monkeypatch: pytest.MonkeyPatch,
    jetstream: JetStreamContext,
) -> None:
    """It waits, as for any other part of the broker, and no failure is counted."""
    for module in (bus_module, reading):
        monkeypatch.setattr(module, "BROKER_DEADLINE_S", 0.3)
    config = config_for(model)
    async with renderer(broker.url, config):
        await jetstream.delete_stream(subjects.MEDIA_STREAM)
        try:
            await publish(bus, task_for(bus, model, messages_with([canary.url("/a.png")])))
            with pytest.raises(TimeoutError):
                await sink.next(2.0)
        finally:
            await bus.streams.prepare(config.nats, config.delivery)
        forwarded, _ = await sink.next_task()
    assert forwarded.header.path[-1].attempt > 1


async def test_the_store_is_each_tenants_own(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str, canary: Canary
) -> None:
    """A client that knows a file's hash cannot find out whether others have sent or fetched it."""
    pinned = await client.pin_media(bus, png(61), "a")
    canary.answers["/own.png"] = send(png(62))
    fetched = media_store.media_url(await media_store.hash_media(png(62)))
    async with renderer(broker.url, config_for(model)) as worker:

        async def ask(url: str, tenant: str) -> str:
            task = task_for(bus, model, messages_with([url]), tenant)
            await publish(bus, task)
            return task.header.request_id

        await ask(canary.url("/own.png"), "a")
        await sink.next()
        for url in (pinned, fetched):
            for tenant in ("b", ""):
                request_id = await ask(url, tenant)
                (record,) = [record async for record in client.follow(bus, request_id)]
                assert isinstance(record, Failure)
                assert record.error.code == "media_not_found"
            await ask(url, "a")
            await sink.next()
        assert worker.render_path.images.counters.processed == 2


async def test_a_removed_file_is_neither_read_from_memory_nor_stored_again(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str
) -> None:
    url = await client.pin_media(bus, png(63))
    name = media_store.parse_media_url(url) or ""
    async with renderer(broker.url, config_for(model)):
        await publish(bus, task_for(bus, model, messages_with([url])))
        await sink.next()
        file = await media_store.look_up(bus, name)
        assert file is not None
        await media_store.remove(bus, file)
        task = task_for(bus, model, messages_with([url]))
        await publish(bus, task)
        (record,) = [record async for record in client.follow(bus, task.header.request_id)]
    assert isinstance(record, Failure)
    assert record.error.code == "media_not_found"
    assert await media_store.look_up(bus, name) is None


async def test_one_stored_image_in_many_requests(
    broker: EmbeddedServer, bus: Bus, sink: Sink, model: str
) -> None:
    url = await client.pin_media(bus, png(1))
    async with renderer(broker.url, config_for(model)) as worker:
        for _ in range(3):
            await publish(bus, task_for(bus, model, messages_with([url, url])))
        tasks = [(await sink.next())[0] for _ in range(3)]
        assert worker.render_path.images.counters.processed == 1
    assert len({item.mm_hash for task in tasks for item in task.items}) == 1


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("media:" + "0" * 64, "media_not_found"),
        ("media:nonsense", "invalid_media"),
        ("media:" + "0" * 63 + "A", "invalid_media"),
    ],
)
async def test_an_image_that_is_not_stored_is_reported_as_missing(
    broker: EmbeddedServer, bus: Bus, model: str, url: str, code: str
) -> None:
    async with renderer(broker.url, config_for(model)):
        task = task_for(bus, model, messages_with([url]))
        listener = await bus.subscribe(subjects.tokens(task.header.request_id))
        await publish(bus, task)
        assert await listener.next(10) is not None
    (failure,) = await read_log(bus, task.header.request_id)
    assert isinstance(failure, Failure)
    assert failure.error.code == code
    assert failure.error.fault == "client"
    assert failure.error.field == "messages[0].content[0].image_url.url"


@pytest.fixture
async def attempt(bus: Bus, canary: Canary, model: str) -> Callable[[], RequestMedia]:
    """Attempts at one request, each with an empty cache."""
    task = task_for(bus, model, messages_with([canary.url("/a.png")]))

    def new() -> RequestMedia:
        limits = config_for(model).renderer
        loader = MediaLoader(limits, in_thread)
        assert task.header.ticket is not None
        sequence = task.header.ticket.sequence
        return RequestMedia(bus, loader, limits, task.header.request_id, sequence)

    return new


async def read_all(job: RequestMedia, canary: Canary) -> bytes:
    source = await job.read(canary.url("/a.png"), "field", IMAGE)
    await job.keep(source)
    return source.data


async def test_of_two_workers_one_decides(
    attempt: Callable[[], RequestMedia], canary: Canary
) -> None:
    """The slow worker has fetched first, and must not forward a file that no other attempt sees."""
    slow, quick = attempt(), attempt()
    assert await read_all(slow, canary) == png(1)
    canary.answers["/a.png"] = send(png(2))
    assert await read_all(quick, canary) == png(2)
    await quick.pin()
    with pytest.raises(Fenced):
        await slow.pin()
    third = attempt()
    await third.recall()
    canary.answers["/a.png"] = send(png(3))
    assert await read_all(third, canary) == png(2)
    await third.pin()


async def test_an_attempt_with_the_same_files_may_continue(
    attempt: Callable[[], RequestMedia], canary: Canary
) -> None:
    first, other = attempt(), attempt()
    assert await read_all(first, canary) == await read_all(other, canary)
    await first.pin()
    await other.pin()


async def test_the_pin_does_not_contain_the_url(
    attempt: Callable[[], RequestMedia], bus: Bus, canary: Canary
) -> None:
    job = attempt()
    await read_all(job, canary)
    await job.pin()
    stored = await bus.read_last(subjects.MEDIA_STREAM, job._subject)
    assert stored is not None
    assert b"127.0.0.1" not in stored.data
    assert (await media_store.hash_media(png(1))).encode() in stored.data
