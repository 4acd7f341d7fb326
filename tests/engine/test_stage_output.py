"""Outputs of an engine for its stage: refused settings, and the logs of codes."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import msgspec
import pytest

from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from shared.protocol.code_tokens import CodeTokens
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.pipeline import OutputSpec, StageSpec
from shared.protocol.records import (
    ChoiceDelta,
    CodeChunk,
    OutputEnd,
    OutputSummary,
    TokenChunk,
    Usage,
)
from shared.protocol.task_messages import SpeechBody, Task, TaskHeader
from workers.engine import code_output as code_outputs
from workers.engine.code_output import CodeOutput, TalkerOutput, _Answer, stage_output
from workers.engine.core.sequence import FrameDelta, LoggedChoice, RequestOutput, SpokenText
from workers.engine.core.speech_pieces import Piece
from workers.engine.loader import LoadedModel
from workers.engine.stage_output import Rendered, TextOutput
from workers.generator.core.schedule import window_at

VOICE = {"<|voice_alloy|>": [95]}
LOADED = LoadedModel(
    model=cast(Any, None),
    tower=None,
    tokenizer=None,
    eos_token_ids=frozenset([96]),
    max_model_len=50,
    vocab_size=97,
    num_blocks=1,
    block_size=8,
    adapters=cast(Any, {}),
    codes=CodeTokens(80, 10),
)
TALKER = StageSpec(
    "talker",
    "engine",
    sampling_defaults={"temperature": 0.0, "max_tokens": 40},
    output=OutputSpec("codes", "codes"),
    voices=["alloy"],
)


class _Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return VOICE.get(text, [1, 2])


RENDERED = Rendered(cast(Any, None))


def loaded(**changes: Any) -> LoadedModel:
    return replace(LOADED, **{"tokenizer": _Tokenizer()} | changes)


def code_output() -> CodeOutput:
    output = stage_output(cast(Any, None), TALKER, loaded(), "the stage")
    assert isinstance(output, CodeOutput)
    return output


def test_a_stage_without_codes_writes_text() -> None:
    for stage in (None, StageSpec("engine", "engine", output=OutputSpec("text", "text"))):
        assert isinstance(stage_output(cast(Any, None), stage, loaded(), "key"), TextOutput)


def test_a_talker_samples_codes_and_the_end_alone() -> None:
    output = code_output()
    assert output.sampling.allowed_token_ids == [*range(80, 90), 96]
    assert output.sampling.temperature == 0.0
    assert output.max_prompt_tokens == 10
    assert output.voices == {"alloy": 95}


@pytest.mark.parametrize(
    ("changes", "stage", "key"),
    [
        ({"codes": None}, {}, "path"),
        ({"codes": CodeTokens(0, 4001)}, {}, "path"),
        ({"eos_token_ids": frozenset()}, {}, "path"),
        ({"max_model_len": 40}, {}, "sampling_defaults"),
        ({}, {"voices": ["echo"]}, "voices"),
    ],
)
def test_a_model_that_cannot_speak_is_refused(
    changes: dict[str, Any], stage: dict[str, Any], key: str
) -> None:
    spec = StageSpec(
        **{
            "name": "talker",
            "role": "engine",
            "output": TALKER.output,
            "sampling_defaults": TALKER.sampling_defaults,
            "voices": ["alloy"],
        }
        | stage
    )
    with pytest.raises(ConfigError) as refused:
        stage_output(cast(Any, None), spec, loaded(**changes), "the stage")
    assert refused.value.field == f"the stage.{key}"


class _Log:
    def __init__(self) -> None:
        self.codes_of: dict[int, list[list[int]]] = {}

        self.end_tokens: list[int | None] = []
        self.end_characters: list[int | None] = []

    async def codes(
        self,
        position: int,
        frames: list[list[int]],
        end_token: int | None,
        end_character: int | None,
    ) -> None:
        self.codes_of[position] = frames
        self.end_tokens.append(end_token)
        self.end_characters.append(end_character)


def step(position: int, token_ids: list[int], **end: Any) -> RequestOutput:
    return RequestOutput("r", [ChoiceDelta(0, position, token_ids, "", **end)])


async def test_the_tokens_of_several_steps_are_one_record_and_the_end_is_no_frame() -> None:
    output, log = code_output(), _Log()
    steps = [step(3, [80]), step(4, [89]), step(5, [96], finish_reason="stop")]
    assert await output.append(cast(Any, log), steps, RENDERED)
    assert log.codes_of == {3: [[0], [9]]}
    assert await output.append(cast(Any, log), steps[-1:], RENDERED)
    assert log.codes_of == {3: [[0], [9]]}


async def test_records_say_how_much_of_the_text_is_spoken() -> None:
    output = stage_output(
        cast(Any, None),
        msgspec.structs.replace(TALKER, frames_per_character=2.0),
        loaded(),
        "the stage",
    )
    assert isinstance(output, CodeOutput)
    # Three records: one token of 4 characters, two tokens of 10, and a last one without text.
    spoken = output._spoken_of(_Answer("", [], [(4, 1), (14, 3), (14, 4)]))
    assert spoken is not None
    assert [spoken(n) for n in (0, 7, 8, 17, 18, 27, 28, 99)] == [0, 0, 1, 1, 2, 2, 4, 4]
    assert code_output()._spoken_of(_Answer("", [], [(4, 1)])) is None
    log = _Log()
    await output.append(cast(Any, log), [step(6, [80, 81])], RENDERED._replace(spoken=spoken))
    await output.append(cast(Any, log), [step(8, [80])], RENDERED)
    assert log.end_tokens == [1, None]


def test_the_codes_of_a_whole_chunk_are_awaited() -> None:
    spec = ChunkSpec(first=(3, 5), size=8, right=2)
    output = replace(code_output(), chunks=[spec])
    awaited = [
        n + 1 for n in range(40) if output.is_awaited(step(n, [80]), RENDERED, is_first=n == 0)
    ]
    assert awaited == [5, 10, 18, 26, 34]
    # These are the numbers of frames with which the vocoder has a further chunk.
    starts = [0, 3, 8, 16, 24]
    for number, start in zip(awaited, starts, strict=True):
        assert window_at(spec, start, number - 1, is_complete=False) is None
        assert window_at(spec, start, number, is_complete=False) is not None
    assert output.is_awaited(step(8, [80, 81, 82]), RENDERED, is_first=False)
    assert not output.is_awaited(step(10, [80, 81, 82]), RENDERED, is_first=False)
    assert not code_output().is_awaited(step(4, [80]), RENDERED, is_first=False)


def test_the_first_tokens_of_a_text_are_awaited() -> None:
    assert TextOutput().is_awaited(step(4, [80]), RENDERED, is_first=True)
    assert not TextOutput().is_awaited(step(5, [80]), RENDERED, is_first=False)


@pytest.mark.parametrize(("reason", "num_frames"), [("stop", 5), ("length", 6)])
def test_the_summary_counts_frames(reason: Any, num_frames: int) -> None:
    last = replace(step(5, [96], finish_reason=reason), usage=Usage(3, 6), kv_blocks=2)
    assert code_output().summary(last, RENDERED) == OutputSummary(
        usage=Usage(3, num_frames),
        kv_blocks=2,
        units={"frames": num_frames},
        finish_reason=reason,
    )


def test_logged_frames_are_the_tokens_that_were_sampled() -> None:
    output = code_output()
    assert output.logged([], 1) == []
    records = [CodeChunk(0, 1, 0, [[0], [9]]), CodeChunk(1, 1, 2, [[3]])]
    assert output.logged(records, 1) == [LoggedChoice([80, 89, 83], finished=False)]
    assert output.logged([*records, OutputEnd(2, 1, OutputSummary())], 1)


async def test_the_last_record_of_a_piece_says_where_the_piece_ends() -> None:
    output, log = code_output(), _Log()
    rendered = RENDERED._replace(piece=Piece(1, 30, False, 7), num_prompt_tokens=50)
    last = replace(step(3, [80, 96], finish_reason="stop"), usage=Usage(3, 5))
    assert await output.append(cast(Any, log), [step(2, [89])], rendered)
    assert await output.append(cast(Any, log), [last], rendered)
    only_end = replace(step(4, [96], finish_reason="stop"), usage=Usage(3, 5))
    assert await output.append(cast(Any, log), [only_end], rendered)
    assert log.codes_of == {9: [[9]], 10: [[0]], 11: []}
    assert log.end_characters == [None, 30, 30]
    assert output.num_frames(last, rendered) == 12
    # A piece that has reached its limit is not whole, so no further one is spoken.
    cut = replace(step(3, [80], finish_reason="length"), usage=Usage(3, 4))
    await output.append(cast(Any, log), [cut], rendered)
    await output.append(cast(Any, log), [last], rendered._replace(piece=Piece(2, 40, True, 7)))
    assert log.end_characters[3:] == [None, None]
    assert output.summary(last, rendered).usage == Usage(50, 11)


# -- the talkers of omni models -------------------------------------------------------------------


class _Talker:
    """Stands in for a talker: four codebooks, and a prompt as long as the text."""

    codes = range(90)
    end_token_ids = frozenset([96])
    voices: ClassVar[dict[str, int]] = {"ethan": 1}

    def has_voice(self, name: str) -> bool:
        return name in self.voices

    def num_inputs(self, prompt_token_ids: list[int]) -> int:
        return len(prompt_token_ids) - 1

    def prompt_tokens(self, speech: SpokenText) -> list[int]:
        return [95] * (len(speech.prompt_token_ids) + len(speech.answer_token_ids))


SPEAKS = {"talker": cast(Any, _Talker()), "codes": CodeTokens(0, 90)}
ETHAN = StageSpec(
    "talker",
    "engine",
    sampling_defaults=TALKER.sampling_defaults,
    output=TALKER.output,
    voices=["ethan"],
)


def talker_output() -> TalkerOutput:
    output = stage_output(cast(Any, None), ETHAN, loaded(**SPEAKS), "the stage")
    assert isinstance(output, TalkerOutput)
    return output


def test_the_talker_of_an_omni_model_provides_its_voices() -> None:
    assert talker_output().sampling.allowed_token_ids == [*range(90), 96]
    with pytest.raises(ConfigError, match="no voice 'alloy'; it has ethan") as refused:
        stage_output(cast(Any, None), TALKER, loaded(**SPEAKS), "the stage")
    assert refused.value.field == "the stage.voices"


async def test_the_items_of_a_prompt_belong_to_the_speech() -> None:
    async def progress() -> None:
        return

    items = [MultiModalKwargsItem("image", "a", PlaceholderRange(1, 1))]
    body = SpeechBody(prompt_token_ids=[1, 7, 2], items=items)
    task = Task(TaskHeader("r", "omni", "interactive"), body)
    rendered = await talker_output().render(task, [], progress)
    assert rendered.task.body.items == items


async def test_a_talker_speaks_each_token_that_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def progress() -> None:
        return

    async def follow_text(*_: object) -> AsyncIterator[TokenChunk]:
        position = 0
        for number, tokens in enumerate([[11], [12, 13], [], [14], [15]]):
            reason: Any = "length" if number == 4 else None
            delta = ChoiceDelta(0, position, tokens, "", finish_reason=reason)
            position += len(tokens)
            yield TokenChunk(number, 1, [delta])

    monkeypatch.setattr(code_outputs, "follow_text", follow_text)
    task = Task(TaskHeader("r", "omni", "interactive"), SpeechBody(prompt_token_ids=[1, 2, 3]))
    rendered = await talker_output().render(task, [], progress)
    assert rendered.speech == SpokenText([1, 2, 3], [], None, 2)
    assert rendered.growth is not None
    assert rendered.spoken is not None
    spoken = []
    figures = []
    async for speech in rendered.growth:
        figures.append((speech.answer_token_ids, speech.num_inputs))
        # No more frames are made than there are tokens, until the text is whole.
        spoken.append([rendered.spoken(n) for n in range(len(speech.answer_token_ids))])
    assert figures == [
        ([11], 2),
        ([11, 12, 13], 4),
        ([11, 12, 13], 4),
        ([11, 12, 13, 14], 5),
        ([11, 12, 13, 14, 15], None),
    ]
    assert all(numbers == [*range(len(numbers))] for numbers in spoken)
    assert [rendered.spoken(n) for n in (5, 6, 99)] == [5, 5, 5]


async def test_frames_have_the_codes_of_all_codebooks() -> None:
    output, log = talker_output(), _Log()

    def frame(position: int, code: int, *residual: int, **end: Any) -> RequestOutput:
        delta = FrameDelta(0, position, [code], "", residuals=[[*residual]], **end)
        return RequestOutput("r", [delta])

    steps = [frame(3, 80, 1, 2, 3), frame(4, 89, 4, 5, 6), frame(5, 96, 0, 0, 0)]
    assert await output.append(cast(Any, log), steps, RENDERED)
    assert log.codes_of == {3: [[80, 1, 2, 3], [89, 4, 5, 6]]}
    records = [CodeChunk(0, 1, 0, [[80, 1, 2, 3]]), CodeChunk(1, 1, 1, [[89, 4, 5, 6]])]
    residuals = [[1, 2, 3], [4, 5, 6]]
    assert output.logged(records, 1) == [LoggedChoice([80, 89], False, residuals)]
    assert output.logged([], 1) == []
