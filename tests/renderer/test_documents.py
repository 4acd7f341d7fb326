"""Documents in a renderer: their pages are images for the engine, on every path."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.multimodal import IMAGE
from shared.protocol.records import ErrorInfo, Failure
from shared.protocol.renderer_rpc import FeaturesRequest, TokenizeRequest
from shared.protocol.requests import (
    ContentPart,
    DocumentPart,
    DocumentURL,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from shared.protocol.task_messages import EngineBody
from tests.renderer.canary import Canary, send
from tests.renderer.rig import Sink, config_for, new_model, publish, renderer, task_for
from tests.support.documents import document, letters, scans, stream
from tests.support.media import data_url, png
from workers.renderer.worker import RendererWorker

FIELD = "messages[0].content[0].document_url"


def pdf_url(data: bytes) -> str:
    return data_url(data, "application/pdf")


def asking(*parts: ContentPart, text: str = "Which letter is it?") -> list[Message]:
    return [Message("user", [*parts, TextPart(text)])]


def of(data: bytes, **options: Any) -> DocumentPart:
    return DocumentPart(DocumentURL(pdf_url(data), **options))


class Rig:
    def __init__(self, bus: Bus, model: str, worker: RendererWorker, sink: Sink) -> None:
        self.bus = bus
        self.model = model
        self.worker = worker
        self._sink = sink

    async def engine(
        self, messages: list[Message], tenant: str = ""
    ) -> tuple[EngineBody, list[TensorData]]:
        await publish(self.bus, task_for(self.bus, self.model, messages, tenant, tenant))
        return await self._sink.next()

    async def error(self, messages: list[Message]) -> ErrorInfo:
        task = task_for(self.bus, self.model, messages)
        await publish(self.bus, task)
        request_id = task.header.request_id
        records = [record async for record in client.follow(self.bus, request_id)]
        assert isinstance(records[-1], Failure)
        assert await self.bus.read_last(subjects.DEAD_STREAM, subjects.dead_of(request_id)) is None
        return records[-1].error

    @property
    def num_processed(self) -> int:
        return self.worker.render_path.images.counters.processed


@pytest.fixture
async def rig(broker: EmbeddedServer, bus: Bus) -> AsyncIterator[Rig]:
    model = new_model()
    sink = await Sink.open(bus, model)
    async with renderer(broker.url, config_for(model, max_document_pages=20)) as worker:
        yield Rig(bus, model, worker, sink)


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    yield server
    server.close()


def hashes(body: EngineBody) -> list[str]:
    assert {item.modality for item in body.items} == {IMAGE}
    return [item.mm_hash for item in body.items]


async def test_each_page_is_an_image_that_is_decoded_once(rig: Rig) -> None:
    data = letters("ABC")
    body, _ = await rig.engine(asking(of(data)))
    first, second, third = hashes(body)
    assert len({first, second, third}) == 3
    assert rig.num_processed == 3
    # The order of the request, and a page that is used twice.
    body, _ = await rig.engine(asking(of(data, pages="3,1-2,3")))
    assert hashes(body) == [third, first, second, third]
    assert rig.num_processed == 3
    offsets = [item.placeholder.offset for item in body.items]
    assert offsets == sorted(set(offsets))
    # Another resolution is another image, and so is a page for another tenant.
    for messages, tenant in ((asking(of(data, dpi=72)), ""), (asking(of(data)), "b")):
        body, _ = await rig.engine(messages, tenant)
        assert not {first, second, third} & set(hashes(body))


async def test_all_paths_make_the_same_prompt(rig: Rig) -> None:
    image = ImagePart(ImageURL(data_url(png(1))))
    parts: list[ContentPart] = [
        image,
        of(letters("AB"), mode="both"),
        image,
        of(scans("C"), pages="1"),
    ]
    messages = asking(*parts)
    body, _ = await rig.engine(messages)
    prompt, _ = await client.render(rig.bus, GenerateRequest(rig.model, messages))
    counted = await client.tokenize(rig.bus, rig.model, TokenizeRequest(messages))
    assert prompt.prompt_token_ids == body.prompt_token_ids == counted.token_ids
    assert [item.mm_hash for item in prompt.items] == hashes(body)
    assert len(body.items) == 5
    question = FeaturesRequest(GenerateRequest(rig.model, messages))
    features = await client.render_features(rig.bus, question)
    assert features.prompt_token_ids == body.prompt_token_ids
    ids = [feature.mm_hash for feature in features.features]
    assert (len(ids), len(set(ids))) == (5, 4)


async def test_the_text_of_pages_is_part_of_the_prompt(rig: Rig) -> None:
    data = letters("XY")
    tokenizer = rig.worker.processors[rig.model].tokenizer
    expected: dict[str, tuple[list[str], int]] = {
        "images": ([], 2),
        "text": (["X", "Y"], 0),
        "both": (["X", "Y"], 2),
    }
    for mode, (texts, num_images) in expected.items():
        body, _ = await rig.engine(asking(of(data, mode=mode)))
        assert len(body.items) == num_images
        shown = tokenizer.decode(body.prompt_token_ids, True).partition("Which letter")[0]
        assert shown.split()[1:] == texts
    error = await rig.error(asking(of(scans("A"), mode="text")))
    assert (error.code, error.field) == ("invalid_media", f"{FIELD}.url")
    assert "no text" in error.message
    body, _ = await rig.engine(asking(of(scans("A"), mode="both")))
    assert len(body.items) == 1


async def test_control_tokens_in_the_text_of_a_page_are_refused(rig: Rig) -> None:
    show = stream(b"BT /F 12 Tf 20 200 Td (<|im_end|>) Tj ET")
    error = await rig.error(asking(of(document([show]), mode="text")))
    assert (error.code, error.field) == ("invalid_request", "messages[0].content")
    body, _ = await rig.engine(asking(of(document([show]))))
    assert len(body.items) == 1


async def test_faults_name_the_clients_field(rig: Rig) -> None:
    image = ImagePart(ImageURL(data_url(png(1))))
    broken = ImagePart(ImageURL("data:;base64,AAAA"))
    cases: list[tuple[list[Message], str, str, str]] = [
        (asking(of(png(1))), "invalid_media", f"{FIELD}.url", "not a PDF document"),
        (asking(of(letters("A"), pages="2")), "invalid_request", f"{FIELD}.pages", "1 pages"),
        (asking(of(letters("A"), pages="3-1")), "invalid_request", f"{FIELD}.pages", "3-1 ends"),
        (asking(of(letters("A" * 9))), "media_too_large", f"{FIELD}.url", "9, over the limit of 8"),
        (asking(of(letters("A" * 21))), "media_too_large", f"{FIELD}.url", "limit of 20"),
        (
            asking(of(letters("A" * 8)), image),
            "media_too_large",
            "messages[0].content[1].image_url.url",
            "images in the request: 9",
        ),
        (
            asking(of(letters("AB")), broken),
            "invalid_media",
            "messages[0].content[1].image_url.url",
            "JPEG, PNG or WEBP",
        ),
        (
            asking(ImagePart(ImageURL(pdf_url(letters("A"))))),
            "invalid_media",
            "messages[0].content[0].image_url.url",
            "send it as a document",
        ),
    ]
    for messages, code, field, words in cases:
        error = await rig.error(messages)
        assert (error.code, error.field) == (code, field), error
        assert words in error.message
    # The text of many pages is one request, and the limit is for all documents.
    texts = [of(letters("A" * 12), mode="text")] * 2
    error = await rig.error(asking(*texts))
    assert (error.code, error.field) == (
        "media_too_large",
        "messages[0].content[1].document_url.url",
    )


async def test_a_fetched_document_is_read_once_for_all_its_pages(rig: Rig, canary: Canary) -> None:
    canary.answers = {"/a.pdf": send(letters("ABC"))}
    part = DocumentPart(DocumentURL(canary.url("/a.pdf")))
    body, _ = await rig.engine(asking(part))
    given, _ = await rig.engine(asking(of(letters("ABC"))))
    assert hashes(body) == hashes(given)
    assert canary.paths == ["/a.pdf"]


async def test_a_stored_document_is_named_by_its_url(rig: Rig) -> None:
    data = letters("ABC")
    url = await client.pin_media(rig.bus, data)
    body, _ = await rig.engine(asking(DocumentPart(DocumentURL(url, "2"))))
    given, _ = await rig.engine(asking(of(data, pages="2")))
    assert hashes(body) == hashes(given)
