"""Spoken chats: what a stream shows depends on the order inside each log alone."""

import base64
import gc
import io
import tracemalloc
import wave
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.schema import GatewayConfig
from shared.errors import Overloaded
from shared.protocol.encoding import to_json
from shared.protocol.records import (
    AnyRecord,
    AudioChunk,
    ChoiceDelta,
    Finish,
    OutputEnd,
    OutputSummary,
    TokenChunk,
    Usage,
)
from workers.gateway.core.assembler import Answering
from workers.gateway.core.kinds import Budget
from workers.gateway.core.memory_budget import MAX_LARGEST, AnswerBudget
from workers.gateway.core.order import SpeechOrder
from workers.gateway.http.errors import AnswerTooLarge
from workers.gateway.openai.chat import AudioOptions, ChatOptions
from workers.gateway.openai.chat_assembler import SAMPLE_BYTES, ChatAssembler
from workers.gateway.schemas.openai_response import ChatChunk, ChatCompletion

WORDS = ["three ", "red ", "", "circles ", "and ", "more"]
SOUND = [bytes([number] * 4 * (number + 1)) for number in range(4)]
TEXT = "".join(WORDS)
PCM = b"".join(SOUND)
SPEECH = Budget().output


def text_log() -> list[AnyRecord]:
    last = len(WORDS) - 1
    chunks: list[AnyRecord] = [
        TokenChunk(i, 1, [ChoiceDelta(0, i, [i], word, "stop" if i == last else None)])
        for i, word in enumerate(WORDS)
    ]
    ends = {"codes": OutputSummary(units={"frames": 7}), "audio": OutputSummary()}
    return [*chunks, Finish(len(WORDS), 1, Usage(3, len(WORDS)), 1, [], ends)]


def sound_log(*, timed: bool) -> list[AnyRecord]:
    records: list[AnyRecord] = []
    for i, pcm in enumerate(SOUND):
        first = sum(map(len, SOUND[:i])) // 2
        spoken = i + 1 if timed else None
        data = base64.b64encode(pcm).decode()
        records.append(AudioChunk(i, 1, first, len(pcm) // 2, 24_000, data, spoken))
    return [*records, OutputEnd(len(SOUND), 1, OutputSummary())]


def assembler(form: str, *, timed: bool) -> ChatAssembler:
    audio = AudioOptions(output="audio", format=form, stored_s=3600, timed=timed)
    options = ChatOptions(include_usage=True, speech=audio)
    return ChatAssembler(Answering("chatcmpl-1", "demo", 5, options))


def shown(chat: ChatAssembler, turns: Sequence[int], *, timed: bool) -> list[tuple[int, ChatChunk]]:
    """Show both logs, with a record of log `turns[i]` as the i-th that arrives."""
    logs, order, chunks = [text_log(), sound_log(timed=timed)], SpeechOrder(timed=timed), []
    for turn in [*turns, *[0] * 20, *[1] * 20]:
        for part, record in order.add(turn, logs[turn].pop(0)) if logs[turn] else ():
            chunks += [(part, chunk) for chunk in chat.add(part, record)]
    return chunks


@given(st.lists(st.integers(0, 1), max_size=12), st.booleans())
def test_each_log_shows_the_same_however_the_records_arrive(turns: list[int], timed: bool) -> None:
    pairs = shown(assembler("pcm16", timed=timed), turns, timed=timed)
    right = shown(assembler("pcm16", timed=timed), [], timed=timed)
    for part in (0, 1):
        own = [to_json(chunk) for of, chunk in pairs if of == part]
        assert own == [to_json(chunk) for of, chunk in right if of == part]
    *chunks, end, usage = [chunk for _, chunk in pairs]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    audio = [delta.audio for delta in deltas if delta.audio]
    assert "".join(delta.content for delta in deltas if delta.content) == TEXT
    assert "".join(piece.transcript for piece in audio if piece.transcript) == TEXT
    assert b"".join(base64.b64decode(piece.data) for piece in audio if piece.data) == PCM
    assert {piece.id for piece in audio} == {"audio_chatcmpl-1"}
    # A client that stops at the reason of the end has all of the speech.
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    assert end.choices[0].finish_reason == "stop"
    assert end.choices[0].delta.audio
    assert end.choices[0].delta.audio.expires_at == 3605
    assert usage.usage
    assert usage.usage.completion_tokens == 7 + len(WORDS)


@given(st.lists(st.integers(0, 1), max_size=12))
def test_a_timed_transcript_comes_with_the_samples_that_speak_it(turns: list[int]) -> None:
    pairs = shown(assembler("pcm16", timed=True), turns, timed=True)
    audio = [chunk.choices[0].delta.audio for part, chunk in pairs if part == 1]
    pieces = [piece.transcript or "" for piece in audio if piece]
    assert pieces == ["three ", "red ", "", "circles ", "and more"]


def test_a_record_with_several_words_is_transcribed_word_by_word() -> None:
    chat = assembler("pcm16", timed=True)
    text = " three red\ncircles "
    chat.add(0, TokenChunk(0, 1, [ChoiceDelta(0, 2, [7] * 5, text)]))
    chunks = [chat.add(1, AudioChunk(n, 1, n, 1, 24_000, "AAA=", 3 + n))[0] for n in range(5)]
    pieces = [chunk.choices[0].delta.audio.transcript or "" for chunk in chunks]
    # Four pieces of text, and five tokens from the third on.
    assert pieces == ["", " three", " red", "\ncircles", " "]


def test_the_whole_answer_has_the_sound_as_a_file() -> None:
    for form, timed in (("wav", False), ("pcm16", True)):
        chat = assembler(form, timed=timed)
        shown(chat, [1, 0, 1], timed=timed)
        answer: ChatCompletion = chat.answer()
        audio = answer.choices[0].message.audio
        assert audio
        assert audio.transcript == answer.choices[0].message.content == TEXT
        data = base64.b64decode(audio.data)
        if form == "wav":
            with wave.open(io.BytesIO(data)) as sound:
                assert sound.getnframes() == len(PCM) // 2
                data = sound.readframes(len(PCM))
        assert data == PCM
        details = answer.usage.completion_tokens_details
        assert details
        assert (details.audio_tokens, details.text_tokens) == (7, len(WORDS))


def test_a_speech_that_is_cut_at_its_stage_ends_with_that_reason() -> None:
    chat = assembler("pcm16", timed=False)
    for record in text_log()[:-1]:
        assert isinstance(record, TokenChunk)
        chat.add(0, record)
    outputs = {"codes": OutputSummary(finish_reason="length")}
    end, _ = chat.add(0, Finish(9, 1, Usage(1, 1), 1, [], outputs))
    assert end.choices[0].finish_reason == "length"


# -- memory ---------------------------------------------------------------------------------------


def test_a_whole_speech_takes_no_more_memory_than_is_reserved() -> None:
    num_samples, num_records = 24_000, 40
    pcm = base64.b64encode(bytes(2 * num_samples)).decode()
    first = text_log()[0]
    assert isinstance(first, TokenChunk)
    gc.collect()
    tracemalloc.start()
    try:
        chat = assembler("wav", timed=False)
        chat.collects_answer = True
        chat.add(0, first)
        for i in range(num_records):
            chat.add(1, AudioChunk(i, 1, i * num_samples, num_samples, 24_000, pcm))
        chat.add(0, Finish(9, 1, Usage(1, 1), 1, []))
        msgspec.json.encode(chat.answer())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    num_bytes = num_records * num_samples * SAMPLE_BYTES
    assert num_bytes / 2 < peak < num_bytes


def test_a_speech_reserves_memory_as_it_grows() -> None:
    budget = AnswerBudget(GatewayConfig(max_answer_mib=1))
    most = 2**20
    scopes: list[dict[str, int]] = [{} for _ in range(MAX_LARGEST)]
    for scope in scopes:
        budget.extend(scope, most // 2, SPEECH)
        budget.extend(scope, most // 2, SPEECH)
    with pytest.raises(AnswerTooLarge, match="a stream has no limit") as refused:
        budget.extend(scopes[0], 2, SPEECH)
    assert refused.value.field == "stream"
    with pytest.raises(Overloaded):
        budget.extend({}, 10, SPEECH)
    budget.release(scopes[0])
    budget.extend({}, 10, SPEECH)
