"""Which path uses the main cache, and which leaves it as it was: contents, order and counters."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from PIL import Image

from shared import client
from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.decoding.image_reader import FORMATS
from shared.errors import ContextTooLong, Overloaded, PagemillError, PayloadTooLarge, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_msgpack
from shared.protocol.multimodal import IMAGE
from shared.protocol.records import Failure
from shared.protocol.renderer_rpc import (
    ErrorReply,
    RenderedPrompt,
    SoundPieces,
    Tokenized,
    TokenizeRequest,
)
from shared.protocol.requests import GenerateRequest, Message, Prompt
from shared.protocol.task_messages import EngineBody
from tests.renderer.canary import Canary, send
from tests.renderer.rig import (
    Sink,
    config_for,
    messages_with,
    new_model,
    publish,
    renderer,
    task_for,
)
from tests.support.media import data_url, png
from tests.support.waiting import until
from workers.renderer import rpc, warmup
from workers.renderer.processing.processor import Processor
from workers.renderer.sound_splitter import SoundSplitter
from workers.renderer.worker import RendererWorker


def blobs_of(worker: RendererWorker) -> Blobs:
    return worker.render_path.images._blobs


class Rig:
    """A renderer, and all ways to call it."""

    def __init__(self, bus: Bus, model: str, worker: RendererWorker, sink: Sink) -> None:
        self.bus = bus
        self.model = model
        self.worker = worker
        self.blobs = blobs_of(worker)
        self._sink = sink

    async def engine(self, messages: list[Message]) -> tuple[EngineBody, list[TensorData]]:
        await publish(self.bus, task_for(self.bus, self.model, messages))
        return await self._sink.next()

    async def render(self, messages: list[Message]) -> tuple[RenderedPrompt, list[TensorData]]:
        answer = await client.render(self.bus, GenerateRequest(self.model, messages))
        return answer

    async def tokenize(self, messages: list[Message]) -> Tokenized:
        return await client.tokenize(self.bus, self.model, TokenizeRequest(messages))

    async def tokenize_text(self, _: list[Message]) -> Tokenized:
        return await client.tokenize(self.bus, self.model, TokenizeRequest(prompt="What is it?"))

    def caches(self) -> dict[str, Any]:
        """Return the render path's caches, the least recently used first, and their counters."""
        pictures, fetched = self.worker.render_path.images, self.worker._loader._fetched[IMAGE]
        return {
            "counters": (pictures.counters.hits, pictures.counters.processed),
            "pictures": list(self.blobs._server.arena.slots._slots),
            "files": [url for *_, url in fetched._entries],
            "file counters": (fetched.hits, fetched.misses),
        }


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    server.answers = {f"/{seed}": send(png(seed)) for seed in range(8)}
    yield server
    server.close()


@pytest.fixture
async def rig(broker: EmbeddedServer, bus: Bus) -> AsyncIterator[Rig]:
    model = new_model()
    sink = await Sink.open(bus, model)
    async with renderer(broker.url, config_for(model)) as worker:
        yield Rig(bus, model, worker, sink)


# The truth table: path, and whether it uses the main cache.
PATHS: dict[str, tuple[Callable[[Rig, list[Message]], Awaitable[Any]], bool]] = {
    "for an engine": (Rig.engine, True),
    "render only": (Rig.render, False),
    "tokenize messages": (Rig.tokenize, False),
    "tokenize a text": (Rig.tokenize_text, False),
}


@pytest.mark.parametrize("scheme", ["data", "http", "media"])
@pytest.mark.parametrize("path", PATHS)
async def test_only_the_render_path_uses_the_main_cache(
    rig: Rig, canary: Canary, path: str, scheme: str
) -> None:
    async def url(seed: int) -> str:
        if scheme == "data":
            return data_url(png(seed))
        return (
            canary.url(f"/{seed}")
            if scheme == "http"
            else await client.pin_media(rig.bus, png(seed))
        )

    ask, uses_main = PATHS[path]
    assert rig.caches()["pictures"] == [], "the warm-up has left something"
    assert rig.caches()["counters"] == (0, 0)
    for seed in (0, 1):
        await rig.engine(messages_with([await url(seed)]))
    before = rig.caches()
    # The least recently used one would move; another one would be added.
    await ask(rig, messages_with([await url(0), await url(2)]))
    after = rig.caches()
    if not uses_main:
        assert after == before
        return
    old, new = before["pictures"], after["pictures"]
    assert new[0] == old[1], "what was used is not the next to go"
    assert set(new) > set(old)
    assert len(new) == 3
    assert after["counters"] == (1, 3)
    if scheme != "data":
        assert after["files"] == [before["files"][1], before["files"][0], await url(2)]
        assert after["file counters"][0] == 1


async def test_both_paths_make_the_same(rig: Rig, canary: Canary) -> None:
    messages = messages_with([data_url(png(1)), canary.url("/2")])
    engine_task, engine_tensors = await rig.engine(messages)
    prompt, tensors = await rig.render(messages)
    counted = await rig.tokenize(messages)
    assert prompt.prompt_token_ids == engine_task.prompt_token_ids == counted.token_ids
    assert counted.count == len(counted.token_ids) < counted.max_model_len
    for ours, theirs in zip(prompt.items, engine_task.items, strict=True):
        assert (ours.mm_hash, ours.placeholder) == (theirs.mm_hash, theirs.placeholder)
        fields, blob = await mm_items.open_item(rig.blobs, theirs, engine_tensors)
        assert fields.keys() == ours.fields.keys()
        for name, tensor in fields.items():
            other = tensors[ours.fields[name]]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            assert bytes(other.data) == bytes(tensor.data)
        if blob is not None:
            blob.close()


async def test_a_request_that_fails_holds_none_of_its_images(rig: Rig) -> None:
    """They would fill the arena until the deadline, and a client that resends them would wait."""
    too_long = "a b " * rig.worker.processors[rig.model].max_model_len
    good = data_url(png(1, (560, 560)))
    for failing in (
        messages_with([good, "data:;base64,AAAA"]),
        messages_with([good], too_long),
    ):
        task = task_for(rig.bus, rig.model, failing)
        await publish(rig.bus, task)
        async with asyncio.timeout(20):
            records = [record async for record in client.follow(rig.bus, task.header.request_id)]
        assert isinstance(records[-1], Failure)
        assert len(rig.caches()["pictures"]) == 1
        await until(lambda: not rig.blobs.num_pinned, 30)


async def test_a_text_is_taken_as_it_is(rig: Rig) -> None:
    processor = rig.worker.processors[rig.model]
    answer = await client.tokenize(rig.bus, rig.model, TokenizeRequest(prompt="two words"))
    assert answer.token_ids == processor.tokenize(Prompt(text="two words"))
    assert answer.max_model_len == processor.max_model_len
    empty = await client.tokenize(rig.bus, rig.model, TokenizeRequest(prompt=""))
    assert empty.count == 0


async def test_counting_goes_beyond_what_fits(rig: Rig) -> None:
    room = rig.worker.processors[rig.model].max_model_len
    text = "a b " * room
    answer = await client.tokenize(rig.bus, rig.model, TokenizeRequest([Message("user", text)]))
    assert answer.count > room
    with pytest.raises(ContextTooLong) as refused:
        await client.render(rig.bus, GenerateRequest(rig.model, [Message("user", text)]))
    assert refused.value.reported


BAD_QUESTIONS: list[tuple[str, Any, str, str | None]] = [
    ("render", b"no json", "invalid_request", None),
    ("render", b'{"model":"other","messages":[]}', "invalid_request", "messages"),
    ("render", {"model": "other"}, "invalid_request", "model"),
    ("render", {"urls": ["media:" + "0" * 64]}, "media_not_found", "content[0].image_url.url"),
    ("render", {"urls": ["ftp://a/b"]}, "invalid_media", "content[0].image_url.url"),
    ("render", {"urls": ["data:;base64,AAAA"]}, "invalid_media", "content[0].image_url.url"),
    ("tokenize", b"{}", "invalid_request", "messages"),
    ("tokenize", b'{"messages":[]}', "invalid_request", "messages"),
    ("tokenize", b'{"prompt":5}', "invalid_request", "prompt"),
    ("tokenize", b'{"prompt":"x","more":1}', "invalid_request", None),
    ("tokenize", b"\xff", "invalid_request", None),
]


async def test_bad_questions_get_one_clear_error(rig: Rig) -> None:
    for service, question, code, field in BAD_QUESTIONS:
        if isinstance(question, dict):
            model = question.get("model", rig.model)
            messages = messages_with(question.get("urls", []))
            question = to_msgpack(GenerateRequest(model, messages))
        subject = subjects.renderer(service, rig.model)
        refusal = msgspec.json.decode(await rig.bus.request(subject, question, 10), type=ErrorReply)
        assert refusal.error.code == code, question
        assert refusal.error.fault == "client"
        assert (refusal.error.field or "").endswith(field or "")


async def test_an_answer_that_does_not_fit_is_an_error(
    broker: EmbeddedServer, bus: Bus, canary: Canary
) -> None:
    model = new_model()
    async with renderer(broker.url, config_for(model)) as worker:
        worker.preview_path.render = _with_little_room(worker)  # type: ignore[method-assign]
        request = GenerateRequest(model, messages_with([data_url(png(1)), data_url(png(2))]))
        with pytest.raises(PayloadTooLarge) as refusal:
            await client.render(bus, request)
    assert refusal.value.field == "messages[0].content[1].image_url.url"


def _with_little_room(worker: RendererWorker) -> Any:
    render = worker.preview_path.render

    async def in_50_kb(processor: Processor, prompt: Prompt, _: int, tenant: str) -> Any:
        return await render(processor, prompt, 50_000, tenant)

    return in_50_kb


async def test_a_call_for_another_model_has_no_responder(rig: Rig) -> None:
    with pytest.raises(Unavailable):
        await client.render(rig.bus, GenerateRequest("nobodys", [Message("user", "?")]))


def hold_previews(rig: Rig, monkeypatch: pytest.MonkeyPatch, may_go_on: asyncio.Event) -> list[int]:
    """Hold the work for calls. Return the numbers of calls at work, counted at each beginning."""
    path, now, numbers = rig.worker.preview_path, 0, list[int]()
    in_thread = path._in_thread

    async def held(function: Any, *args: Any) -> Any:
        nonlocal now
        now += 1
        numbers.append(now)
        await may_go_on.wait()
        try:
            return await in_thread(function, *args)
        finally:
            now -= 1

    monkeypatch.setattr(path, "_in_thread", held)
    return numbers


async def test_a_burst_leaves_threads_to_the_engines_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls use at most one of the two threads."""
    all_have_come = asyncio.Event()
    held = hold_previews(rig, monkeypatch, all_have_come)
    monkeypatch.setattr(rpc, "MAX_HELD", 16)
    request = GenerateRequest(rig.model, messages_with([data_url(png(1, (560, 560)))]))
    burst = [asyncio.create_task(client.render(rig.bus, request)) for _ in range(24)]
    task, _ = await rig.engine(messages_with([data_url(png(2))]))
    assert task.items
    for done in itertools.islice(asyncio.as_completed(burst), 8):
        with pytest.raises(Overloaded):
            await done
    all_have_come.set()
    answers = await asyncio.gather(*burst, return_exceptions=True)
    refused = [type(answer) for answer in answers if isinstance(answer, Exception)]
    assert set(held) == {1}
    assert refused == [Overloaded] * 8


async def test_tokens_are_counted_while_a_recording_is_split(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def split(*_: object) -> list[str]:
        has_begun.set()
        await may_end.wait()
        return []

    monkeypatch.setattr(SoundSplitter, "split", split)
    splitting = asyncio.create_task(client.split_sound(rig.bus, rig.model, "media:" + "0" * 64))
    await has_begun.wait()
    await client.tokenize(rig.bus, rig.model, TokenizeRequest(prompt="two words"))
    may_end.set()
    assert isinstance(await splitting, SoundPieces)


async def test_a_burst_of_one_tenant_leaves_room_for_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get half of the places and every other turn, for a burst of any length."""
    monkeypatch.setattr(rpc, "MAX_HELD", 8)
    request = GenerateRequest(rig.model, messages_with([data_url(png(1, (560, 560)))]))
    order: list[str] = []
    all_have_come = asyncio.Event()
    hold_previews(rig, monkeypatch, all_have_come)

    async def ask(tenant: str) -> str:
        try:
            await client.render(rig.bus, request, tenant=tenant)
        except PagemillError as error:
            return error.code
        order.append(tenant)
        return "answered"

    burst = [asyncio.create_task(ask("many")) for _ in range(24)]
    few = [asyncio.create_task(ask("few")) for _ in range(4)]
    # Eight of the 28 calls are held. Only when all others are refused have all of them arrived.
    for refusal in itertools.islice(asyncio.as_completed(burst), 20):
        assert await refusal == "overloaded"
    all_have_come.set()
    assert await asyncio.gather(*few) == ["answered"] * 4
    outcomes = await asyncio.gather(*burst)
    assert outcomes.count("answered") == order.count("many") == 4
    assert order.index("few") < 3
    # Nothing is held any more.
    assert await asyncio.gather(*(ask("many") for _ in range(8))) == ["answered"] * 8


async def test_questions_are_shared_among_renderers(broker: EmbeddedServer, bus: Bus) -> None:
    model = new_model()
    config = config_for(model)
    request = GenerateRequest(model, messages_with([data_url(png(1))]))
    async with renderer(broker.url, config), renderer(broker.url, config) as second:
        transports = blobs_of(second)._transports
        assert transports == {}, "the warm-up has left a connection to the first"
        await asyncio.gather(*(client.render(bus, request) for _ in range(8)))
    with pytest.raises(Unavailable):
        await client.render(bus, request)


async def test_a_failed_warm_up_is_logged_and_leaves_nothing(
    broker: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at its last image, when there is something to leave."""
    rendered = 0
    encode = envelope.encode

    def fail(*args: Any) -> None:
        nonlocal rendered
        rendered += 1
        encode(*args)
        if rendered == 3:
            raise RuntimeError("planted")

    monkeypatch.setattr(warmup, "envelope", SimpleNamespace(encode=fail))
    model = new_model()
    sink = await Sink.open(bus, model)
    with structlog.testing.capture_logs() as logs:
        async with renderer(broker.url, config_for(model)) as worker:
            rig = Rig(bus, model, worker, sink)
            assert rig.caches()["pictures"] == []
            assert rig.caches()["counters"] == (0, 0)
            task, _ = await rig.engine(messages_with([data_url(png(1))]))
    assert task.items
    events = [(log["event"], log["path"], log["model"]) for log in logs if "path" in log]
    assert events == [("warm_up_failed", "render", model), ("warmed_up", "preview", model)]


async def test_the_warm_up_reads_every_kind_of_file(
    broker: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str | None] = []
    really = Image.open

    def open_(*args: Any, **options: Any) -> Image.Image:
        image = really(*args, **options)
        opened.append(image.format)
        return image

    monkeypatch.setattr(Image, "open", open_)
    async with renderer(broker.url, config_for(new_model())):
        pass
    assert sorted(map(str, opened)) == sorted(FORMATS * 2), "once for each path"
