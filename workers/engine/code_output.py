"""Codes of a speech: the output of an engine that speaks a text."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import ConfigError, ContextTooLong
from shared.protocol.chunks import ChunkSpec, interpolate
from shared.protocol.code_tokens import CodeTokens
from shared.protocol.pipeline import CODES, StageSpec
from shared.protocol.records import AnyRecord, CodeChunk, OutputSummary
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, SpeechBody, Task, TaskBody, TaskHeader
from shared.stage.inputs import follow_text
from shared.state.token_log import LogWriter
from workers.engine.core.sequence import (
    FrameDelta,
    LoggedChoice,
    RequestOutput,
    SpokenText,
    SpokenTokens,
)
from workers.engine.core.speech_pieces import Piece, frames_of_piece, has_next_piece, next_piece
from workers.engine.log_records import merge_deltas
from workers.engine.stage_output import Progress, Rendered, StageOutput, TextOutput

if TYPE_CHECKING:
    # These modules import torch, which an output does not need.
    from workers.engine.loader import LoadedModel
    from workers.engine.model.talker import Talker

# Interval at which a request that waits for its text reports progress.
PROGRESS_S = 1.0
# The following stages need whole chunks. Frames that are not in the log are lost when the engine
# dies.
CODE_APPENDS_PER_S = 1.0
# With the end tokens, the codes must fit into `allowed_token_ids`, which holds at most 4096. Codecs
# have one or two thousand codes.
MAX_CODES = 4000


@dataclass(frozen=True, slots=True)
class CodeOutput:
    """Codes of a speech: the prompt is a whole text and a voice, and each frame is a token, or a
    fixed number of them."""

    bus: Bus
    stage: str
    sampling: SamplingParams
    """Sampling parameters of the stage, for all requests. They allow only codes and end tokens."""
    codes: CodeTokens
    max_prompt_tokens: int
    encode: Callable[[str], list[int]]
    voices: dict[str, int]
    """Token id of each voice, which comes last in the prompt; empty for a model that reads the
    names of voices."""
    chunks: Sequence[ChunkSpec] = ()
    """Chunks of the following stages."""
    frames_per_character: float | None = None
    """Value from the stage's specification."""
    body: ClassVar[type[TaskBody]] = SpeechBody
    is_answer: ClassVar[bool] = False
    appends_per_s: ClassVar[float] = CODE_APPENDS_PER_S

    async def render(
        self, task: Task[SpeechBody], records: Sequence[AnyRecord], progress: Progress
    ) -> Rendered:
        """Raises RequestEnded, and ContextTooLong for a text that is too long."""
        header, text, spoken = task.header, task.body.text, None
        if text is None:
            answer = await _whole_answer(self.bus, header, progress)
            text, spoken = answer.text, self._spoken_of(answer)
        pieces, piece = next_piece(text, self._max_characters, records)
        # A text that is spoken as a whole keeps its spaces.
        spoken_pieces = [text] if len(pieces) == 1 else [each.strip() or each for each in pieces]
        prompts = [await self._prompt_of(each, task) for each in spoken_pieces]
        own = replace(header, sampling=self.sampling, adapter=None)
        return Rendered(
            Task(own, EngineBody(prompts[piece.number], [])),
            spoken=spoken,
            piece=piece,
            num_prompt_tokens=sum(map(len, prompts)),
        )

    @property
    def _max_characters(self) -> int | None:
        """Length of the longest text that a speech has room for, even if it is slow."""
        each, max_tokens = self.codes.characters_per_frame, self.sampling.max_tokens
        if each is None or max_tokens is None:
            return None
        return max(1, int(each * (max_tokens // self.codes.num_places)))

    async def _prompt_of(self, text: str, task: Task[SpeechBody]) -> list[int]:
        """Return the prompt of a text. Raises ContextTooLong."""
        codes, voice = self.codes, task.header.voice
        if codes.names_voice and voice is not None:
            text = f"{voice}: {text}"
        ends = [*codes.closing, *([self.voices[voice]] if voice in self.voices else [])]
        # A text may be as long as a message. A thread keeps the event loop free for other requests.
        token_ids = await asyncio.to_thread(self.encode, text)
        limit = self.max_prompt_tokens - len(codes.opening) - len(ends)
        field = "outputs" if task.body.text is None else "given_text"
        _check_len(len(token_ids), limit, self.stage, field)
        return [*codes.opening, *token_ids, *ends]

    def _spoken_of(self, answer: "_Answer") -> SpokenTokens | None:
        """Return an estimate of the spoken tokens: all characters count as equally long."""
        length = self.frames_per_character
        if length is None:
            return None
        return lambda num_frames: interpolate(answer.lengths, num_frames / length)

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        if not records:
            return []
        tokens = self.codes.tokens_of(frames_of_piece(records))
        return [LoggedChoice(tokens, finished=False)]

    @property
    def record_tokens(self) -> int:
        return self.codes.num_places

    def is_awaited(self, output: RequestOutput, rendered: Rendered, *, is_first: bool) -> bool:
        return _is_awaited(output, self.chunks, rendered.piece, self.codes.num_places)

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], rendered: Rendered
    ) -> bool:
        for delta in merge_deltas(outputs):
            frames = self.codes.frames_of(delta.token_ids)
            position = rendered.piece.first_frame + delta.position // self.codes.num_places
            is_end = has_next_piece(outputs[-1], rendered.piece)
            end = rendered.piece.end if is_end else None
            await _append_frames(log, position, frames, rendered.spoken, end)
        return any(output.choices for output in outputs)

    def num_frames(self, last: RequestOutput, rendered: Rendered) -> int:
        return _num_frames(last, rendered.piece, self.codes.num_places)

    def summary(self, last: RequestOutput, rendered: Rendered) -> OutputSummary:
        return _summary_of(last, rendered, self.codes.num_places)


@dataclass(frozen=True, slots=True)
class TalkerOutput:
    """Codes of an answer: the talker of an omni model speaks the answer, given its prompt."""

    bus: Bus
    stage: str
    sampling: SamplingParams
    """Sampling parameters of the stage, for all requests. They allow only codes and end tokens."""
    max_prompt_tokens: int
    talker: "Talker"
    chunks: Sequence[ChunkSpec] = ()
    """Chunks of the following stages."""
    body: ClassVar[type[TaskBody]] = SpeechBody
    is_answer: ClassVar[bool] = False
    appends_per_s: ClassVar[float] = CODE_APPENDS_PER_S
    record_tokens: ClassVar[int] = 1

    async def render(
        self, task: Task[SpeechBody], records: Sequence[AnyRecord], progress: Progress
    ) -> Rendered:
        """Raises RequestEnded, ContextTooLong for an answer that is too long, and InvalidRequest
        for a prompt without an assistant turn."""
        header, prompt = task.header, task.body.prompt_token_ids
        speech = SpokenText(prompt, [], header.voice, self.talker.num_inputs(prompt))
        tokens = self.talker.prompt_tokens(speech)
        _check_len(len(tokens), self.max_prompt_tokens, self.stage, "outputs")
        read: list[int] = []
        if speech.num_inputs is None:
            read += (await _whole_answer(self.bus, header, progress)).token_ids
            speech, growth = SpokenText(prompt, read, header.voice), None
        else:
            growth = self._follow(header, speech, speech.num_inputs, read)
        own = replace(header, sampling=self.sampling, adapter=None)

        def spoken(num_frames: int) -> int:
            # The talker reads one token before each frame, until it has read the last token. It
            # never makes a frame before it has read the token.
            return min(num_frames, len(read))

        return Rendered(Task(own, EngineBody(tokens, task.body.items)), speech, spoken, growth)

    async def _follow(
        self, header: TaskHeader, speech: SpokenText, num_inputs: int, read: list[int]
    ) -> AsyncGenerator[SpokenText]:
        """Yield a growing answer; its tokens are added to `read`. Raises RequestEnded."""
        async for chunk in follow_text(self.bus, header):
            for delta in chunk.choices:
                read += delta.token_ids
            is_whole = any(delta.finish_reason is not None for delta in chunk.choices)
            num_ready = None if is_whole else num_inputs + max(0, len(read) - 1)
            yield SpokenText(speech.prompt_token_ids, [*read], speech.voice, num_ready)

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        if not records:
            return []
        frames = [f for record in records if isinstance(record, CodeChunk) for f in record.frames]
        codes = [self.talker.codes[frame[0]] for frame in frames]
        residuals = [frame[1:] for frame in frames if len(frame) > 1]
        return [LoggedChoice(codes, finished=False, residuals=residuals)]

    def is_awaited(self, output: RequestOutput, rendered: Rendered, *, is_first: bool) -> bool:
        return _is_awaited(output, self.chunks, rendered.piece)

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], rendered: Rendered
    ) -> bool:
        deltas = [delta for output in outputs for delta in output.choices]
        codes, frames = self.talker.codes, []
        for delta in deltas:
            assert isinstance(delta, FrameDelta)
            pairs = zip(delta.token_ids, delta.residuals, strict=True)
            frames += [[codes.index(code), *rest] for code, rest in pairs if code in codes]
        if deltas:
            await _append_frames(log, deltas[0].position, frames, rendered.spoken)
        return bool(deltas)

    def num_frames(self, last: RequestOutput, rendered: Rendered) -> int:
        return _num_frames(last, rendered.piece)

    def summary(self, last: RequestOutput, rendered: Rendered) -> OutputSummary:
        return _summary_of(last, rendered)


def stage_output(
    bus: Bus,
    stage: StageSpec | None,
    loaded: "LoadedModel",
    key: str,
    chunks: Sequence[ChunkSpec] = (),
) -> StageOutput:
    """Return the output that an engine with this model writes for a stage.

    `key` is the stage's key in the settings, and `chunks` holds the chunk specifications of the
    stages that read the codes. Raises ConfigError.
    """
    if stage is None or stage.output is None or stage.output.kind != CODES:
        return TextOutput()
    codes = loaded.codes
    is_long = codes is not None and codes.num_codes > MAX_CODES and loaded.talker is None
    if codes is None or (is_long and codes.num_places == 1) or not loaded.eos_token_ids:
        raise ConfigError(
            f"{key}.path: a model that speaks needs code_offset and num_codes in its config.json,"
            f" for 1 to {MAX_CODES} of its {loaded.vocab_size} tokens, and an end token",
            field=f"{key}.path",
        )
    sampling = msgspec.convert(stage.sampling_defaults, SamplingParams)
    max_tokens = sampling.max_tokens or 1
    if max_tokens >= loaded.max_model_len:
        raise ConfigError(
            f"{key}.sampling_defaults: max_tokens {max_tokens} leaves no room for a text in the"
            f" context of {loaded.max_model_len}",
            field=f"{key}.sampling_defaults",
        )
    spoken = replace(sampling, n=1, detokenize=False)
    if codes.num_places == 1:
        allowed = [*codes.token_ids, *sorted(loaded.eos_token_ids)]
        spoken = replace(spoken, allowed_token_ids=allowed)
    if loaded.talker is not None:
        _check_voices(stage.voices, loaded.talker, key)
        room = loaded.max_model_len - max_tokens
        return TalkerOutput(bus, stage.name, spoken, room, loaded.talker, chunks)
    return CodeOutput(
        bus,
        stage.name,
        spoken,
        codes,
        loaded.max_model_len - max_tokens,
        loaded.encode_part,
        {}
        if codes.names_voice
        else {voice: _token_of(voice, loaded, f"{key}.voices") for voice in stage.voices},
        chunks,
        stage.frames_per_character,
    )


def _token_of(voice: str, loaded: "LoadedModel", key: str) -> int:
    token_ids = loaded.encode_part(f"<|voice_{voice}|>")
    if len(token_ids) != 1:
        raise ConfigError(f"{key}: the model has no token <|voice_{voice}|>", field=key)
    return token_ids[0]


def _check_voices(voices: Sequence[str], talker: "Talker", key: str) -> None:
    names = ", ".join(sorted(talker.voices))
    for voice in voices:
        if not talker.has_voice(voice):
            message = f"the model has no voice {voice!r}; it has {names}"
            raise ConfigError(f"{key}.voices: {message}", field=f"{key}.voices")


def _check_len(num_tokens: int, limit: int, stage: str, field: str) -> None:
    if num_tokens > limit:
        raise ContextTooLong(
            f"the text has {num_tokens} tokens, and stage {stage} speaks at most {limit} at one"
            " time",
            field=field,
        )


def _is_awaited(
    output: RequestOutput, chunks: Sequence[ChunkSpec], piece: Piece, num_places: int = 1
) -> bool:
    """Whether the frames of a step complete a chunk of a following stage."""
    numbers = {
        piece.first_frame + (delta.position + number) // num_places
        for delta in output.choices
        for number in range(1, len(delta.token_ids) + 1)
        if (delta.position + number) % num_places == 0
    }
    return any(spec.completes(number) for spec in chunks for number in numbers)


async def _append_frames(
    log: LogWriter,
    position: int,
    frames: list[list[int]],
    spoken: SpokenTokens | None,
    end_character: int | None = None,
) -> None:
    if frames or end_character is not None:
        end_token = None if spoken is None else spoken(position + len(frames))
        await log.codes(position, frames, end_token, end_character)


def _num_frames(last: RequestOutput, piece: Piece, num_places: int = 1) -> int:
    num_tokens = max((d.position + len(d.token_ids) for d in last.choices), default=0)
    return piece.first_frame + num_tokens // num_places


def _summary_of(last: RequestOutput, rendered: Rendered, num_places: int = 1) -> OutputSummary:
    assert last.usage is not None
    reason = last.choices[-1].finish_reason
    # The end token is not of a frame.
    num_of_piece = (last.usage.completion_tokens - (reason == "stop")) // num_places
    num_frames = rendered.piece.first_frame + num_of_piece
    num_prompt_tokens = rendered.num_prompt_tokens or last.usage.prompt_tokens
    usage = replace(last.usage, prompt_tokens=num_prompt_tokens, completion_tokens=num_frames)
    return OutputSummary(
        usage=usage,
        kv_blocks=last.kv_blocks,
        units={"frames": num_frames},
        finish_reason=reason,
    )


class _Answer(NamedTuple):
    text: str
    token_ids: list[int]
    lengths: list[tuple[int, int]]
    """Numbers of characters and of tokens up to the end of each delta."""


async def _whole_answer(bus: Bus, header: TaskHeader, progress: Progress) -> _Answer:
    """Wait for the end of a request's text. Raises RequestEnded."""
    reading = asyncio.create_task(_read_answer(bus, header))
    try:
        while not (await asyncio.wait({reading}, timeout=PROGRESS_S))[0]:
            await progress()
        return reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read_answer(bus: Bus, header: TaskHeader) -> _Answer:
    parts: list[str] = []
    token_ids: list[int] = []
    num_characters, lengths = 0, []
    async for chunk in follow_text(bus, header):
        for delta in chunk.choices:
            parts.append(delta.text)
            token_ids += delta.token_ids
            num_characters += len(delta.text)
            lengths.append((num_characters, len(token_ids)))
    return _Answer("".join(parts), token_ids, lengths)
