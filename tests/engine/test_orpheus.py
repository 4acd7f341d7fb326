"""Orpheus on the engine: prompts and codes are those of transformers, also of resumed speeches."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from shared.config.schema import Config, EngineConfig, ModelConfig
from shared.errors import ContextTooLong
from shared.protocol.pipeline import Pipeline
from shared.protocol.records import AnyRecord, CodeChunk
from shared.protocol.task_messages import SpeechBody, Task, TaskHeader
from shared.stage.graphs import graph_of_folder
from shared.stage.pipelines import check_pipelines, pipeline_of
from tests import orpheus
from tests.orpheus import PlainOrpheus
from workers.engine.code_output import CodeOutput, stage_output
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, LoggedChoice
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.engine.stage_output import Rendered

MAX_TOKENS = 175
# The first two fill a piece of 20 characters.
TEXTS = ["three red circles ok", "How are you today? A", "Hello"]


class Speaker(NamedTuple):
    output: CodeOutput
    core: EngineCore
    plain: PlainOrpheus

    async def render(self, text: str, voice: str, records: list[AnyRecord]) -> Rendered:
        async def progress() -> None:
            return

        header = TaskHeader("r", "m", "interactive", voice=voice)
        return await self.output.render(Task(header, SpeechBody(text)), records, progress)

    async def prompt(self, text: str, voice: str) -> list[int]:
        rendered = await self.render(text, voice, [])
        assert rendered.piece.is_last
        return rendered.task.body.prompt_token_ids

    def run(self, prompts: dict[str, list[int]], **more: Any) -> dict[str, list[int]]:
        """Return the tokens of speeches in one batch, without their ends."""
        for name, prompt in prompts.items():
            self.core.add(EngineRequest(name, prompt, [], self.output.sampling, **more))
        tokens: dict[str, list[int]] = {name: [] for name in prompts}
        while self.core.has_work:
            for step in self.core.step():
                assert step.error is None
                for delta in step.choices:
                    tokens[step.request_id] += delta.token_ids
        ends = self.output.codes.end_token_ids
        return {name: [t for t in all_ if t not in ends] for name, all_ in tokens.items()}


def pipeline_with(folder: Path) -> Pipeline:
    graph = graph_of_folder(folder)
    assert graph == "orpheus"
    model = ModelConfig(str(folder), graph=graph)
    check_pipelines(Config({"m": model}), ["engine", "generator"], "file")
    return pipeline_of(model)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = tmp_path_factory.mktemp("orpheus")
    orpheus.write(folder)
    stage = pipeline_with(folder).stage("talker")
    assert stage is not None
    stage.sampling_defaults.update(temperature=0.0, max_tokens=MAX_TOKENS)
    engine = EngineConfig(kv_cache_mib=64)
    loaded = load(ModelConfig(str(folder), dtype="float64"), engine, speaks=True)
    output = stage_output(cast(Any, None), stage, loaded, "the stage")
    assert isinstance(output, CodeOutput)
    return Speaker(output, build_core(loaded, engine), PlainOrpheus(folder))


async def test_speeches_of_one_batch_are_those_of_generate(speaker: Speaker) -> None:
    prompts, expected = {}, {}
    for text in TEXTS:
        for voice in ("tara", "zoe"):
            name = f"{voice}: {text}"
            prompts[name] = await speaker.prompt(text, voice)
            assert prompts[name] == speaker.plain.prompt(text, voice)
            expected[name] = speaker.plain.speak(text, MAX_TOKENS, voice)
    tokens = speaker.run(prompts)
    assert tokens == {name: each for name, (each, _) in expected.items()}
    assert {reason for _, reason in expected.values()} == {"stop", "length"}
    frames = [speaker.output.codes.frames_of(each) for each in tokens.values()]
    assert frames == [speaker.plain.frames(each) for each in tokens.values()]
    assert len({code for each in frames for frame in each for code in frame}) > 50


async def test_a_speech_continues_after_any_of_its_frames(speaker: Speaker) -> None:
    text = TEXTS[0]
    prompt, (tokens, _) = await speaker.prompt(text, "tara"), speaker.plain.speak(text, MAX_TOKENS)
    for num_frames in range(1, MAX_TOKENS // 7, 8):
        frames = speaker.plain.frames(tokens)[:num_frames]
        logged = [LoggedChoice(speaker.output.codes.tokens_of(frames), finished=False)]
        rest = speaker.run({"r": prompt}, logged=logged)["r"]
        assert rest == tokens[7 * num_frames :]


async def test_a_long_text_is_spoken_in_pieces(speaker: Speaker) -> None:
    records: list[AnyRecord] = []
    pieces = ["One red circle. ", "Two blue squares, ", "and more"]
    for number, piece in enumerate(pieces):
        rendered = await speaker.render("".join(pieces), "tara", records)
        assert rendered.task.body.prompt_token_ids == speaker.plain.prompt(piece.strip(), "tara")
        assert rendered.piece.is_last == (number == 2)
        assert speaker.output.logged(records, 1) in ([], [LoggedChoice([], finished=False)])
        position = rendered.piece.first_frame
        assert position == 4 * number
        records += [
            CodeChunk(2 * number, 1, position, [[1] * 7] * 3),
            CodeChunk(2 * number + 1, 1, position + 3, [[2] * 7], None, rendered.piece.end),
        ]
        all_prompts = [speaker.plain.prompt(each.strip(), "tara") for each in pieces]
        assert rendered.num_prompt_tokens == sum(map(len, all_prompts))
    unfinished = [*records[:3]]
    tokens = speaker.output.codes.tokens_of([[1] * 7] * 3)
    assert speaker.output.logged(unfinished, 1) == [LoggedChoice(tokens, finished=False)]


async def test_a_text_in_one_piece_keeps_its_spaces(speaker: Speaker) -> None:
    assert await speaker.prompt(" a cat\n", "tara") == speaker.plain.prompt(" a cat\n", "tara")


async def test_a_text_that_the_context_has_no_room_for_is_refused(speaker: Speaker) -> None:
    small = replace(speaker.output, max_prompt_tokens=30)
    with pytest.raises(ContextTooLong, match="the text has 26 tokens") as refused:
        await speaker._replace(output=small).prompt("a" * 20, "tara")
    assert refused.value.field == "given_text"


def test_it_speaks_the_texts_of_requests_alone(speaker: Speaker, tmp_path: Path) -> None:
    orpheus.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    pipeline = pipeline_with(tmp_path)
    assert [stage.name for stage in pipeline.stages] == ["talker", "code2wav"]
    assert pipeline.with_text_given == pipeline
    assert pipeline.voices[0] == "tara"
