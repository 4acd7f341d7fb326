"""Transcripts of several pieces, whose records arrive in any order."""

import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from shared.errors import RequestError
from shared.protocol.records import ChoiceDelta, Finish, TokenChunk, Usage
from shared.protocol.requests import AudioPart, AudioURL, TextPart
from workers.gateway.core.assembler import Answering
from workers.gateway.core.order import in_part_order
from workers.gateway.openai.transcription import (
    TranscriptionAssembler,
    check_transcription,
    plan_transcription,
)
from workers.gateway.schemas.transcription import TranscriptDelta, TranscriptDone, TranscriptionForm

TEXTS = [["I", " came"], [], ["I saw,"], ["I con", "quered"]]
WHOLE = "I came I saw, I conquered"


def form(**fields: Any) -> TranscriptionForm:
    return TranscriptionForm(model="m", **fields)


def records(seed: int) -> list[tuple[int, Any]]:
    """The records of four pieces, mixed, each piece's own in order."""
    logs = []
    for part, texts in enumerate(TEXTS):
        log: list[Any] = [
            TokenChunk(index, 1, [ChoiceDelta(0, 0, [1], text)]) for index, text in enumerate(texts)
        ]
        logs.append(
            [(part, record) for record in [*log, Finish(len(log), 1, Usage(10, len(log)), 0, [])]]
        )
    rng, mixed = random.Random(seed), []
    while any(logs):
        mixed.append(rng.choice([log for log in logs if log]).pop(0))
    return mixed


def new_assembler(**fields: Any) -> TranscriptionAssembler:
    plan = plan_transcription(form(**fields), ["media:" + "0" * 64] * len(TEXTS))
    return TranscriptionAssembler(Answering("id", "m", 0, plan.options))


async def assemble(seed: int, **fields: Any) -> tuple[list[Any], TranscriptionAssembler]:
    async def mixed() -> AsyncGenerator[tuple[int, Any], None]:
        for numbered in records(seed):
            yield numbered

    assembler, events = new_assembler(**fields), []
    async for part, record in in_part_order(None, mixed()):
        events += assembler.add(part, record)
    return events, assembler


@pytest.mark.parametrize("seed", range(5))
async def test_the_text_has_the_order_of_the_pieces(seed: int) -> None:
    events, assembler = await assemble(seed)
    answer = assembler.answer()
    assert (answer.text, answer.usage.input_tokens, answer.usage.output_tokens) == (WHOLE, 40, 5)
    *deltas, done = events
    assert "".join(event.delta for event in deltas) == WHOLE
    assert all(isinstance(event, TranscriptDelta) for event in deltas)
    assert isinstance(done, TranscriptDone)
    assert done.text == WHOLE


async def test_languages_without_spaces_get_none_between_pieces() -> None:
    _, assembler = await assemble(0, language="zh")
    assert assembler.answer().text == "I cameI saw,I conquered"


def test_the_instruction_names_the_language() -> None:
    plan = plan_transcription(form(language="de", prompt="Names: Jörg."), ["media:" + "0" * 64])
    (request,) = plan.requests
    assert request.messages is not None
    assert request.messages[0].content == [
        AudioPart(AudioURL("media:" + "0" * 64)),
        TextPart("Transcribe the German speech into text.\nNames: Jörg."),
    ]
    assert request.template_kwargs == {
        "task": "transcribe",
        "language": "de",
        "prompt": "Names: Jörg.",
    }
    assert plan.sampling == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "verbose_json"}, "timestamps"),
        ({"response_format": "srt"}, "timestamps"),
        ({"response_format": "vtt"}, "timestamps"),
        ({"response_format": "xml"}, "json, text"),
        ({"response_format": "text", "stream": True}, "which has events"),
        ({"language": "xx"}, "'xx' is not available"),
    ],
)
def test_a_field_of_an_impossible_transcript_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_transcription(form(**fields))
    assert caught.value.field in fields
