"""The parts of omni models on the engine against transformers, token for token, in float64."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from shared.stage.graphs import graph_of_folder
from tests import omni
from tests.engine.model.test_audio_parity import Clip, Content, HeardCase, Marks, fill_in, inputs_of
from tests.engine.model.test_parity import (
    PROCESSOR,
    Case,
    RandomSchedule,
    Twins,
    greedy_answer,
    make_case,
    run_schedule,
)
from tests.engine.model.test_sounding_videos import Sounding, sounding_item
from tests.sounds import draw_sound
from workers.engine.core.sequence import EngineRequest, FrameDelta, LoggedChoice, SpokenText
from workers.engine.loader import LoadedModel, load
from workers.engine.main import build_core
from workers.engine.model.talker import Talker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # The talker in transformers intends a penalty that sees no prompt.
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`"),
]

ENGINE = EngineConfig(num_blocks=200, block_size=8)


@dataclass(frozen=True)
class Omni:
    folder: Path
    whole: Any
    """The model in transformers."""
    thinker: LoadedModel
    talker: LoadedModel
    cases: dict[str, HeardCase]
    """By question."""
    answers: dict[str, omni.SpokenAnswer]
    """By question."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Omni]:
    folder = tmp_path_factory.mktemp("omni")
    omni.write_qwen3(folder / "3")
    omni.write_qwen25(folder / "2.5")
    return {
        "3": make(folder / "3", omni.reference_qwen3, omni.speak_qwen3, 100),
        "2.5": make(folder / "2.5", omni.reference_qwen25, omni.speak_qwen25, None),
    }


def make(
    folder: Path,
    read: Callable[[Path], Any],
    speak: Callable[..., omni.SpokenAnswer],
    chunk_len: int | None,
) -> Omni:
    whole = read(folder)
    model = ModelConfig(str(folder), dtype="float64", tower="engine")
    cases = {
        question: case_of(question, media, chunk_len)
        for question, (_, media) in (QUESTIONS | ABOUT_MEDIA).items()
    }
    answers = {
        question: speak(
            whole,
            cases[question].request.prompt_token_ids,
            num_tokens,
            NUM_FRAMES,
            **inputs_of(cases[question]),
        )
        for question, (num_tokens, _) in (QUESTIONS | ABOUT_MEDIA).items()
    }
    thinker, talker = load(model, ENGINE), load(model, ENGINE, speaks=True)
    return Omni(folder, whole, thinker, talker, cases, answers)


def case_of(question: str, media: list[Content], chunk_len: int | None) -> HeardCase:
    """A question after some media, in the turn of a user."""
    prompt = omni.user_prompt(question)
    # The turn begins with a mark, the role and a line break.
    words = [prompt[:3], *[[9]] * (len(media) - 1), prompt[3:]] if media else [prompt]
    return fill_in(question, words, media, chunk_len, omni_marks())


def omni_marks() -> Marks:
    return Marks(
        (omni.AUDIO_START, omni.AUDIO, omni.AUDIO_END),
        (omni.VISION_START, omni.IMAGE, omni.VISION_END),
        (omni.VISION_START, omni.VIDEO, omni.VISION_END),
    )


def thinker_answer(whole: Any, case: Case) -> list[int]:
    inputs = PROCESSOR(case.images, return_tensors="pt") if case.images else {}
    return greedy_answer(whole.thinker, case.request, **inputs)


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_thinkers_write_what_transformers_writes(models: dict[str, Omni], name: str) -> None:
    model = models[name]
    cases = [
        make_case("text", [], 23, 12, omni.IMAGE_MARKS),
        make_case("two", [(60, 120), (90, 84)], 5, 12, omni.IMAGE_MARKS),
    ]
    answers = {case.request.request_id: thinker_answer(model.whole, case) for case in cases}
    assert all(len(set(answer)) > 3 for answer in answers.values())
    twins = Twins(model.whole, model.thinker.model, model.thinker.tower)
    for schedule in (
        RandomSchedule(random.Random(1), 64, 4, max_chunk=64, preempt_share=0),
        RandomSchedule(random.Random(2), 64, 4, max_chunk=7, preempt_share=0.1),
    ):
        assert run_schedule(twins, cases, schedule) == answers


# -- talkers --------------------------------------------------------------------------------------

NUM_FRAMES = 16
QUESTIONS: dict[str, tuple[int, list[Content]]] = {
    "What can you do?": (12, []),
    "Count three red circles.": (3, []),
    "Hi": (20, []),
}
"""Questions, with the most tokens of their answers, and media before them."""
ABOUT_MEDIA: dict[str, tuple[int, list[Content]]] = {
    "What is it?": (9, [(90, 60)]),
    "Who speaks?": (7, [18_000]),
    "What do they do?": (8, [17_100, Clip(6, 3.0), (60, 120)]),
}


GREEDY = SamplingParams(
    temperature=0, repetition_penalty=1.05, max_tokens=NUM_FRAMES, detokenize=False
)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.9, top_k=50, seed=3)
ROOMY = EngineConfig(num_blocks=128, block_size=8)
SMALL = EngineConfig(num_blocks=13, block_size=4, max_num_batched_tokens=7, max_num_seqs=3)
Spoken = dict[str, list[list[int]]]


def speak(
    model: Omni,
    logged: Spoken,
    sampling: SamplingParams = GREEDY,
    engine: EngineConfig = ROOMY,
    arrivals: random.Random | None = None,
    typing: random.Random | None = None,
) -> Spoken:
    """All frames of some answers, from one engine. Those of `logged` are in the log already.

    With `arrivals`, the requests come one by one, between random steps. With `typing`, their texts
    come bit by bit.
    """
    talker = model.talker.talker
    assert talker is not None
    sized = replace(
        model.talker,
        num_blocks=engine.num_blocks or 0,
        block_size=engine.block_size or 0,
        max_model_len=min(160, (engine.num_blocks or 0) * (engine.block_size or 0)),
    )
    core = build_core(sized, engine)
    allowed = [*talker.codes, *talker.end_token_ids]
    spoken = {question: [*frames] for question, frames in logged.items()}
    waiting = []
    unread = {question: model.answers[question].token_ids for question in logged}
    prompts = {question: model.cases[question].request for question in logged}
    for question, frames in logged.items():
        prompt = prompts[question]
        speech = known_text(talker, prompt, unread[question], 0 if typing else None)
        waiting.append(
            EngineRequest(
                question,
                talker.prompt_tokens(speech),
                [],
                msgspec.structs.replace(sampling, allowed_token_ids=allowed),
                [LoggedChoice([f[0] for f in frames], False, [f[1:] for f in frames if f[1:]])],
                speech=speech,
            )
        )
    num_typed = dict.fromkeys(unread, 0)
    while waiting or core.has_work or (typing and num_typed):
        while waiting and (arrivals is None or not core.has_work or arrivals.random() < 0.15):
            core.add(waiting.pop(0))
        if typing and num_typed and typing.random() < 0.3:
            question = typing.choice([*num_typed])
            num_typed[question] += typing.randint(1, 3)
            if num_typed[question] >= len(unread[question]):
                del num_typed[question]
            number = num_typed.get(question)
            text = known_text(talker, prompts[question], unread[question], number)
            core.extend_speech(question, replace(text, items=[]))
        if not core.has_work:
            continue
        for output in core.step():
            assert output.error is None, output.error
            for delta in output.choices:
                assert isinstance(delta, FrameDelta)
                for code, residual in zip(delta.token_ids, delta.residuals, strict=True):
                    spoken[output.request_id] += [[code, *residual]] * (code in talker.codes)
    assert engine is not SMALL or sampling is not GREEDY or core.stats().num_preemptions > 0
    return spoken


def known_text(
    talker: Talker, request: EngineRequest, answer: list[int], num_known: int | None
) -> SpokenText:
    """An answer, whole or its beginning."""
    prompt, items = request.prompt_token_ids, request.items
    if num_known is None:
        return SpokenText(prompt, answer, omni.VOICES[0], items=items)
    num_inputs = talker.num_inputs(prompt)
    assert num_inputs is not None
    num_inputs += max(0, num_known - 1)
    return SpokenText(prompt, answer[:num_known], omni.VOICES[0], num_inputs, items)


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_talkers_speak_what_transformers_speaks(models: dict[str, Omni], name: str) -> None:
    model = models[name]
    expected = {question: model.answers[question].frames for question in QUESTIONS}
    assert sum(map(len, expected.values())) > NUM_FRAMES
    assert len({frame[0] for frames in expected.values() for frame in frames}) > 5
    nothing: Spoken = {question: [] for question in QUESTIONS}
    assert speak(model, nothing) == expected
    # Chunks of seven tokens, and too few blocks for all.
    assert speak(model, nothing, engine=SMALL) == expected
    assert speak(model, nothing, engine=SMALL, arrivals=random.Random(4)) == expected
    resumed = {question: frames[:5] for question, frames in expected.items()}
    assert speak(model, resumed) == expected


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_talkers_speak_about_media_what_transformers_speaks(
    models: dict[str, Omni], name: str
) -> None:
    model = models[name]
    expected = {question: model.answers[question].frames for question in ABOUT_MEDIA}
    assert len({frame[0] for frames in expected.values() for frame in frames}) > 5
    nothing: Spoken = {question: [] for question in ABOUT_MEDIA}
    assert speak(model, nothing) == expected
    # Without the media, the same weights speak otherwise.
    bare = {
        question: replace(case, request=replace(case.request, items=[]))
        for question, case in model.cases.items()
    }
    assert speak(replace(model, cases=bare), nothing) != expected


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_talkers_hear_the_sound_of_a_video(models: dict[str, Omni], name: str) -> None:
    plain = models[name]
    contents = {
        "What do they say?": Sounding(Clip(8, 2.0), 20_011),
        "Who sings?": Sounding(Clip(4, 1.0), 30_000),
    }
    cases = {
        question: sounding_case(question, content, 100 if name == "3" else None)
        for question, content in contents.items()
    }
    options = {"use_audio_in_video": True}
    if name == "3":  # transformers drops the option for the talker, which then misses the sound.
        options["talker_use_audio_in_video"] = True
    speak_whole = omni.speak_qwen3 if name == "3" else omni.speak_qwen25
    answers = {
        question: speak_whole(
            plain.whole, case.request.prompt_token_ids, 9, NUM_FRAMES, **inputs_of(case), **options
        )
        for question, case in cases.items()
    }
    model = replace(plain, cases=cases, answers=answers)
    for question, case in cases.items():
        schedule = RandomSchedule(random.Random(1), 64, 8, max_chunk=64, preempt_share=0)
        twins = Twins(model.whole, model.thinker.model, model.thinker.tower)
        written = run_schedule(twins, [case], schedule)[question]
        assert written[: len(answers[question].token_ids)] == answers[question].token_ids
    expected = {question: answer.frames for question, answer in answers.items()}
    assert len({frame[0] for frames in expected.values() for frame in frames}) > 5
    assert speak(model, {question: [] for question in cases}) == expected
    encoded = {question: encoded_case(model, case) for question, case in cases.items()}
    assert speak(replace(model, cases=encoded), {question: [] for question in cases}) == expected


def sounding_case(question: str, content: Sounding, chunk_len: int | None) -> HeardCase:
    """A question after a video with its sound."""
    prompt, marks = omni.user_prompt(question), omni_marks()
    seed = len(question)
    item, token_ids = sounding_item(content, 4, seed, chunk_len, marks)
    start, _, end = marks.video
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompt = [*prompt[:3], start, *token_ids, end, *prompt[3:]]
    sounds = [draw_sound(seed, content.num_samples)]
    return HeardCase(EngineRequest(question, prompt, [item], params), [], sounds)


@pytest.mark.long
@pytest.mark.parametrize("name", ["3", "2.5"])
def test_any_schedule_speaks_about_media_the_same(models: dict[str, Omni], name: str) -> None:
    """Also with embeddings of an encoder, and while the answer is read."""
    model = models[name]
    expected = {question: model.answers[question].frames for question in ABOUT_MEDIA}
    nothing: Spoken = {question: [] for question in ABOUT_MEDIA}
    small = msgspec.structs.replace(SMALL, num_blocks=30)
    assert speak(model, nothing, engine=small) == expected
    resumed = {question: frames[:5] for question, frames in expected.items()}
    assert speak(model, resumed) == expected
    encoded = {question: encoded_case(model, case) for question, case in model.cases.items()}
    assert speak(replace(model, cases=encoded), nothing) == expected
    if name == "3":
        assert speak(model, nothing, typing=random.Random(5)) == expected


def encoded_case(model: Omni, case: HeardCase) -> HeardCase:
    """The case with embeddings of a tower, in place of pixels and features."""
    tower = model.thinker.tower
    assert tower is not None
    items = []
    for item in case.request.items:
        (embedding,) = tower.encode([item.fields])
        names = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_frames"}
        fields = {name: value for name, value in item.fields.items() if name in names}
        items.append(replace(item, fields=fields, embedding=embedding))
    return replace(case, request=replace(case.request, items=items))


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_a_text_outside_of_the_vocabulary_is_not_spoken(models: dict[str, Omni], name: str) -> None:
    talker = models[name].talker.talker
    assert talker is not None
    prompt, answer = omni.user_prompt("Hi"), [1, 2, 3]
    assert len(talker.speech_rows_of(SpokenText(prompt, answer, omni.VOICES[0])).prompt)
    for token_id in (-1, talker.num_text_tokens, 2**40):
        for speech in (
            SpokenText([*prompt[:4], token_id, *prompt[4:]], answer, omni.VOICES[0]),
            SpokenText(prompt, [1, token_id, 3], omni.VOICES[0]),
        ):
            with pytest.raises(InvalidRequest, match=f"0 to {talker.num_text_tokens - 1}"):
                talker.speech_rows_of(speech)


def test_a_talker_that_reads_while_it_speaks_says_the_same(models: dict[str, Omni]) -> None:
    """For every arrival of the text, in small chunks, with preemption, and after logged frames."""
    model = models["3"]
    expected = {question: model.answers[question].frames for question in QUESTIONS}
    nothing: Spoken = {question: [] for question in QUESTIONS}
    resumed = {question: frames[:5] for question, frames in expected.items()}
    for seed, (logged, engine) in enumerate([(nothing, ROOMY), (nothing, SMALL), (resumed, ROOMY)]):
        assert speak(model, logged, engine=engine, typing=random.Random(seed)) == expected
    together = speak(model, nothing, SAMPLED)
    assert speak(model, nothing, SAMPLED, SMALL, typing=random.Random(3)) == together
    other = models["2.5"].talker.talker
    assert other is not None
    assert other.num_inputs(omni.user_prompt("Hi")) is None


@pytest.mark.parametrize("name", ["3", "2.5"])
def test_a_sampled_speech_depends_on_its_seed_alone(models: dict[str, Omni], name: str) -> None:
    model = models[name]
    together = speak(model, {question: [] for question in QUESTIONS}, SAMPLED)
    for question, frames in together.items():
        assert speak(model, {question: frames[:4]}, SAMPLED) == {question: frames}
    assert speak(model, {key: [] for key in QUESTIONS}, SAMPLED, SMALL) == together
    other = msgspec.structs.replace(SAMPLED, seed=4)
    assert speak(model, {key: [] for key in QUESTIONS}, other) != together


@pytest.mark.parametrize(("name", "graph"), [("3", "qwen3-omni"), ("2.5", "qwen2.5-omni")])
def test_the_folder_of_a_model_with_a_talker_has_its_graph(
    models: dict[str, Omni], name: str, graph: str
) -> None:
    folder = models[name].folder
    assert graph_of_folder(folder) == graph
