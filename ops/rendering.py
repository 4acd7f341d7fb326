"""Rendering of prompts in one call, without a renderer's threads and caches."""

from collections.abc import Iterable, Sequence

from shared.models.media import DecodedMedia
from shared.protocol.requests import Message, Prompt
from workers.renderer.processing import prompt
from workers.renderer.processing.processor import Processor, Rendered, join


def render(
    processor: Processor,
    messages: Sequence[Message],
    media: Iterable[DecodedMedia],
    tenant: str = "",
) -> Rendered:
    """Render messages. `media` are the media of `prompt.media_parts`, in this order.

    Each medium is taken from the iterator after `check` and after the text. At most two are held at
    once. Raises the errors of `Processor.tokenize`, `process` and `expand`.
    """
    token_ids = processor.tokenize(Prompt(list(messages)))
    processed = [
        processor.process(medium, part.field, tenant, part.sampling)
        for medium, part in zip(media, prompt.media_parts(messages), strict=True)
    ]
    token_ids, ranges = processor.expand(token_ids, processed)
    return join(token_ids, ranges, processed)
