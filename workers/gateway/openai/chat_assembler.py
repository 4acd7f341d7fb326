"""Assembler of chat completions. Pure."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from shared.protocol.records import (
    AnyRecord,
    AudioChunk,
    ChoiceDelta,
    Finish,
    OutputEnd,
    OutputSummary,
)
from workers.gateway.core.assembler import Answering, or_unset
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.logprobs import openai_logprobs
from workers.gateway.core.order import Records, in_speech_order
from workers.gateway.core.sound_formats import WAV, wav_header
from workers.gateway.http import errors
from workers.gateway.openai.assembler import ChoiceState, OpenAIAssembler
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.openai.tool_calls import ChoiceText
from workers.gateway.schemas.openai_response import (
    AnswerAudio,
    AnswerMessage,
    AudioDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    SpeechError,
    TokenLogprob,
)

# Peak memory for one sample of a speech that is not streamed. Measured with tracemalloc: 10 bytes.
SAMPLE_BYTES = 12

# A word includes the spaces before it, so that all words together are the text.
_WORDS = re.compile(r"\s*\S+|\s+$")


@dataclass(slots=True)
class _Choice(ChoiceState):
    text: ChoiceText
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class _Speech:
    """The speech so far."""

    id: str
    expires_at: int
    pieces: list[tuple[int, str]] = field(default_factory=list)
    """Pieces of text that the transcript lacks, each with the number of tokens up to its end."""
    pcm: bytearray = field(default_factory=bytearray)
    sample_rate: int = 24_000
    error: SpeechError | UnsetType = UNSET

    def transcribe(self, num_tokens: int | None) -> str:
        """Return the next text of the transcript, up to this number of tokens, or all with None."""
        spoken = [p for p in self.pieces if num_tokens is None or p[0] <= num_tokens]
        del self.pieces[: len(spoken)]
        return "".join(text for _, text in spoken)


class ChatAssembler(OpenAIAssembler[ChatOptions, _Choice]):
    """Assembler of chat completions, with tool calls or a speech.

    The transcript of a speech is the answer's text. In a stream with timed sound, it comes with the
    samples that speak it, and otherwise with the text.
    """

    chunk_type, answer_type = ChatChunk, ChatCompletion
    sample_bytes = SAMPLE_BYTES

    def __init__(self, request: Answering[ChatOptions]) -> None:
        super().__init__(request)
        audio = self.options.output
        self._speech = None
        if audio is not None:
            self.max_events = 2  # The end of the request, and its usage.
            expires_at = request.created_s + audio.stored_s
            self._speech = _Speech(f"audio_{request.request_id}", expires_at)

    def _advance(self, part: int, delta: ChoiceDelta) -> ChatChunkChoice | None:
        choice, options = self.choices.get(delta.index), self.options
        if choice is None:
            name, form = f"{self.request.request_id}:{delta.index}", options.form or None
            one_call = bool(options.one_call)
            text = ChoiceText(name, form, options.names or [], one_call=one_call)
            choice = self.choices[delta.index] = _Choice(text)
        is_last = delta.finish_reason is not None
        content, calls = choice.text.feed(delta.text, is_last=is_last)
        logprobs = None
        if options.logprobs and delta.logprobs:
            logprobs = list(
                openai_logprobs(delta.token_ids, delta.logprobs, self.request.token_bytes)
            )
            if self.collects_answer:
                choice.logprobs += logprobs
        if is_last:
            choice.finish_reason = choice.text.finish_reason(delta.finish_reason)
            choice.stop_reason = delta.stop_reason
        # A spoken answer has its finish reason at the end of the speech.
        shows_reason = is_last and self._speech is None
        if choice.has_begun and not (content or calls or logprobs or shows_reason):
            return None
        is_first, choice.has_begun = not choice.has_begun, True
        return ChatChunkChoice(
            delta.index,
            Delta(
                role="assistant" if is_first else UNSET,
                content=content if content or (is_first and not calls) else UNSET,
                tool_calls=calls or UNSET,
                audio=self._transcript_of(delta, content),
            ),
            None if logprobs is None else ChatLogprobs(logprobs),
            choice.finish_reason if shows_reason else None,
            or_unset(choice.stop_reason) if shows_reason else UNSET,
        )

    def _transcript_of(self, delta: ChoiceDelta, content: str) -> AudioDelta | UnsetType:
        speech, audio = self._speech, self.options.output
        if speech is None or audio is None or not content:
            return UNSET
        speech.pieces += _pieces_of(delta, content)
        if audio.timed:
            return UNSET
        return AudioDelta(speech.id, transcript=speech.transcribe(None))

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        speech = self._speech
        if speech is None:
            return super().add(part, record)
        match record:
            case AudioChunk():
                if self.collects_answer:
                    speech.pcm += base64.b64decode(record.pcm)
                    speech.sample_rate = record.sample_rate
                text = speech.transcribe(record.end_token or 0)
                return [self._audio_chunk(AudioDelta(speech.id, record.pcm, text or UNSET))]
            case OutputEnd():
                text = speech.transcribe(None)
                if not text:
                    return []
                return [self._audio_chunk(AudioDelta(speech.id, transcript=text))]
            case Finish():
                return [self._end_speech(speech, record.outputs), *super().add(part, record)]
            case _:
                return super().add(part, record)

    def _end_speech(self, speech: _Speech, outputs: Mapping[str, OutputSummary]) -> Any:
        frames = sum(summary.units.get("frames", 0) for summary in outputs.values())
        self.audio_tokens = int(frames)
        choice = self.choices[0]
        if any(summary.finish_reason == "length" for summary in outputs.values()):
            choice.finish_reason = "length"
        cut = next((summary.error for summary in outputs.values() if summary.error), None)
        if cut is not None:
            body = errors.body_of(cut).error
            speech.error = SpeechError(body.code, body.message, body.param)
        end = AudioDelta(speech.id, expires_at=speech.expires_at, error=speech.error)
        return self._audio_chunk(end, choice.finish_reason, or_unset(choice.stop_reason))

    def _audio_chunk(
        self,
        audio: AudioDelta,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | UnsetType = UNSET,
    ) -> Any:
        choice = ChatChunkChoice(0, Delta(audio=audio), None, finish_reason, stop_reason)
        return self._chunk([choice])

    def _audio_of(self, content: str | None) -> AnswerAudio | UnsetType:
        speech, audio = self._speech, self.options.output
        if speech is None or audio is None:
            return UNSET
        head = wav_header(speech.sample_rate, len(speech.pcm)) if audio.format == WAV else b""
        data = base64.b64encode(head + speech.pcm).decode()
        return AnswerAudio(speech.id, data, content or "", speech.expires_at, speech.error)

    def _whole(self, index: int, choice: _Choice) -> ChatChoice:
        content, calls = choice.text.whole()
        return ChatChoice(
            index,
            AnswerMessage(content, tool_calls=calls, audio=self._audio_of(content)),
            ChatLogprobs(choice.logprobs) if self.options.logprobs else None,
            choice.finish_reason,
            or_unset(choice.stop_reason),
        )


def _pieces_of(delta: ChoiceDelta, content: str) -> list[tuple[int, str]]:
    """Return the words of a record's text, each with the number of tokens up to its end.

    The tokens of a record are divided equally among its words.
    """
    words, num_tokens = _WORDS.findall(content), len(delta.token_ids)
    ends = (-(-num_tokens * number // len(words)) for number in range(1, len(words) + 1))
    return [(delta.position + end, word) for end, word in zip(ends, words, strict=True)]


def _order(options: ChatOptions, records: Records) -> Records:
    audio = options.output
    return records if audio is None else in_speech_order(records, timed=audio.timed)


CHAT = AnswerKind(
    name="chat",
    id_prefix="chatcmpl",
    options=ChatOptions,
    assembler=ChatAssembler,
    client_fields=ClientFields(
        {"items": "messages", "outputs": "modalities", "voice": "audio.voice"}
    ),
    order=_order,
)
