"""Documents: replaces each document of a prompt by images and texts of its pages.

The number of pages is known only when a document is open, so this happens before the prompt is
tokenized. Afterwards each page is an image like any other, which is decoded and cached separately.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from msgspec.structs import asdict, replace

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, InvalidRequest, MediaTooLarge
from shared.protocol.multimodal import DOCUMENT, Page
from shared.protocol.requests import (
    ContentPart,
    DocumentPart,
    DocumentURL,
    Message,
    Prompt,
    TextPart,
)
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.processing.processor import Processor
from workers.renderer.processing.prompt import ExpandedMessage, PagePart, parts_of

MAX_TEXT_BYTES = 4 * 2**20
"""Limit on the text of one document."""

Read = Callable[[str, str], Awaitable[bytes]]
"""Function that returns the file at a URL. The second argument is the field for errors."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """A prompt with pages in place of its documents."""

    prompt: Prompt
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the documents, by URL."""


class DocumentExpander:
    def __init__(self, decoders: MediaDecoders, config: RendererConfig) -> None:
        self._decoders = decoders
        self._max_pages = config.max_document_pages

    async def expand(
        self,
        processor: Processor,
        prompt: Prompt,
        read: Read,
        tenant: str,
        lane: str = "interactive",
    ) -> Expansion:
        """Return the prompt with images and texts of pages in place of its documents.

        Raises a RequestError that names the field of a document, or the errors of `read`.
        """
        files: dict[str, bytes] = {}
        contents: dict[str, list[ContentPart]] = {}
        num_pages = 0
        for part_field, part in parts_of(prompt.messages):
            if not isinstance(part, DocumentPart):
                continue
            if not files:
                processor.check(prompt.messages)
            url_field = f"{part_field}.{part.url_field}"
            if part.url not in files:
                files[part.url] = await read(part.url, url_field)
            max_pages = self._max_pages - num_pages
            data, document = files[part.url], part.document_url
            survey = partial(self._survey, document, data, url_field, tenant, max_pages)
            pages = await self._decoders.run(DOCUMENT, survey, lane)
            num_pages += len(pages)
            contents[part_field] = list(_contents_of(document, pages))
        if not files:
            return Expansion(prompt)
        messages = [_expand(message, i, contents) for i, message in enumerate(prompt.messages)]
        return Expansion(replace(prompt, messages=messages), files)

    def _survey(
        self, document: DocumentURL, data: bytes, field: str, tenant: str, max_pages: int
    ) -> list[tuple[int, str]]:
        """Return the number and the text of each selected page, "" if the text is not used."""
        use = document.pages, document.mode
        with self._decoders.open_document(data, field, tenant, use) as decoding:
            num_pages = decoding.probe_document().num_pages
            numbers = select_pages(document.pages, num_pages, field)
            if len(numbers) > max_pages:
                raise MediaTooLarge(
                    f"the documents of the request have more pages than the limit of"
                    f" {self._max_pages} (renderer.max_document_pages); select pages by `pages`",
                    field=field,
                )
            if document.mode == "images":
                return [(number, "") for number in numbers]
            texts = list(_check_texts(decoding.read_texts(numbers), field))
        if document.mode == "text" and not any(texts):
            raise InvalidMedia("the pages have no text; use the mode images", field=field)
        return list(zip(numbers, texts, strict=True))


def select_pages(pages: str | None, num_pages: int, field: str) -> list[int]:
    """Return the selected pages of a document. Raises InvalidRequest with the field `pages`.

    `field` is the field of the document's URL.
    """
    if pages is None:
        return list(range(1, num_pages + 1))
    pages_field = f"{field.removesuffix('url')}pages"
    ranges = []
    for text in pages.split(","):
        first, _, last = text.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise InvalidRequest(f"pages: {text} ends before it begins", field=pages_field)
        if numbers[-1] > num_pages:
            raise InvalidRequest(
                f"pages: the document has {num_pages} pages, and no page {numbers[-1]}",
                field=pages_field,
            )
        ranges.append(numbers)
    return list(chain.from_iterable(ranges))


def _check_texts(texts: Iterator[str], field: str) -> Iterator[str]:
    """Yield the texts without blanks at their ends. Raises MediaTooLarge."""
    num_bytes = 0
    for text in texts:
        num_bytes += len(text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise MediaTooLarge(
                f"the document's pages have more text than the limit of {MAX_TEXT_BYTES} bytes;"
                " select fewer pages by `pages`",
                field=field,
            )
        yield text.strip()


def _contents_of(document: DocumentURL, pages: list[tuple[int, str]]) -> Iterator[ContentPart]:
    for number, text in pages:
        if document.mode != "text":
            yield PagePart(document, page=Page(number, document.dpi))
        if text:
            # Templates join the parts of a message without a separator.
            yield TextPart(f"{text}\n")


def _expand(message: Message, i: int, contents: Mapping[str, list[ContentPart]]) -> Message:
    if not isinstance(message.content, list):
        return message
    parts: list[ContentPart] = []
    indexes: list[int] = []
    for j, part in enumerate(message.content):
        expanded = contents.get(f"messages[{i}].content[{j}]", [part])
        parts += expanded
        indexes += [j] * len(expanded)
    return ExpandedMessage(**asdict(message) | {"content": parts, "indexes": indexes})
