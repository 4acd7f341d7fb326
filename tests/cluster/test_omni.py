"""Omni models by real processes, with tiny random weights: thinker, talker and vocoder.

Text ids, codes and samples equal the output of transformers in float64, also when a worker of each
stage is killed in the middle of its work.
"""

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared import client
from shared.bus.bus import Bus
from shared.config.schema import ModelConfig
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.records import (
    AudioChunk,
    CodeChunk,
    Finish,
    LogRecord,
    OutputRecord,
    TokenChunk,
)
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.sampling import SamplingParams
from shared.state.log_records import decode_record
from tests import omni
from tests.cluster.processes import (
    Processes,
    joined_sound,
    running,
    until_nothing_is_left,
    until_records,
)
from tests.engine.model.test_parity import draw_image
from tests.support.slow_steps import slow_down
from workers.engine.runner import ModelRunner
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Samples, Speaker, cut
from workers.generator.loader import load_vocoder
from workers.renderer.processing.processor import Processor

# transformers warns that the penalty sees no prompt, as intended for the talker.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`"),
    pytest.mark.usefixtures("one_thread"),
]

NUM_TOKENS, NUM_FRAMES, SEED = 24, 30, 5
MODEL = """
    dtype: float64
    stages:
      talker:
        sampling_defaults: {{temperature: 0.0, repetition_penalty: 1.05, max_tokens: {num_frames}}}
        voices: [Ethan, Chelsie]
      code2wav: {{chunks: {{first: [3], size: {size}, left: {left}, right: {right}}}}}
"""
CONFIG = f"""
models:
  qwen3:
    path: qwen3
    graph: qwen3-omni
    tower: encoder
{MODEL.format(num_frames=NUM_FRAMES, size=5, left=40, right=1)}
  qwen25:
    path: qwen25
    graph: qwen2.5-omni
{MODEL.format(num_frames=NUM_FRAMES, size=20, left=100, right=100)}
engine: {{kv_cache_mib: 64}}
delivery: {{ack_wait_s: 2.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "encoder": ["encoder", "--model", "qwen3"],
    "engine": ["engine", "--model", "qwen3"],
    "talker": ["engine", "--stage", "talker", "--model", "qwen3"],
    "code2wav": ["generator", "--stage", "code2wav", "--model", "qwen3"],
}
OTHERS = {
    f"{stage} of qwen25": [*call[:-1], "qwen25"]
    for stage, call in WORKERS.items()
    if call[1:] and stage != "encoder"
}
STEP_S = 0.03
"""Minimum time of a step, so that a worker can be killed in the middle of its work."""
QUESTIONS = ["Hi", "Count three red circles."]


def register_roles() -> None:
    slow_down(ModelRunner, "launch", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("omni")
    (folder / "pagemill.yaml").write_text(CONFIG)
    omni.write_qwen3(folder / "qwen3")
    omni.write_qwen25(folder / "qwen25")
    with running(folder, WORKERS | OTHERS, __name__) as started:
        yield started


@pytest.fixture(scope="module")
def answers(processes: Processes) -> dict[str, omni.SpokenAnswer]:
    """Answers of transformers with Qwen3-Omni, by question."""
    model = omni.reference_qwen3(processes.folder / "qwen3")
    return {
        question: omni.speak_qwen3(model, omni.user_prompt(question), NUM_TOKENS, NUM_FRAMES)
        for question in QUESTIONS
    }


class Said(NamedTuple):
    text: list[LogRecord]
    codes: list[OutputRecord]
    audio: list[OutputRecord]


async def ask(
    bus: Bus, question: str | list[Message], request_id: str, model: str = "qwen3"
) -> Said:
    request = GenerateRequest(
        model,
        messages=None if isinstance(question, str) else question,
        prompt_token_ids=omni.user_prompt(question) if isinstance(question, str) else None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=SEED),
        outputs=["text", "audio"],
    )

    async def output(name: str) -> list[OutputRecord]:
        return [record async for record in client.follow_output(bus, request_id, name)]

    async def own() -> list[LogRecord]:
        return [record async for record in client.ask(bus, request, request_id)]

    return Said(*await asyncio.gather(own(), output("codes"), output("audio")))


def check(speech: Said, expected: omni.SpokenAnswer, pcm: Samples | None = None) -> None:
    *chunks, finish = speech.text
    assert isinstance(finish, Finish), finish
    deltas = [d for chunk in chunks if isinstance(chunk, TokenChunk) for d in chunk.choices]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected.token_ids
    frames = [frame for r in speech.codes if isinstance(r, CodeChunk) for frame in r.frames]
    assert frames == expected.frames
    # A talker reads a token of the text before each frame.
    for record in speech.codes:
        if isinstance(record, CodeChunk):
            spoken = min(record.position + len(record.frames), len(expected.token_ids))
            assert record.end_token == spoken
    ends = [record.end_token for record in speech.audio if isinstance(record, AudioChunk)]
    assert ends[-1] == min(len(expected.frames), len(expected.token_ids))
    sound = np.frombuffer(joined_sound(speech.audio), "<i2")
    np.testing.assert_array_equal(sound, omni.pcm(expected.sound) if pcm is None else pcm)
    assert {span.stage for span in finish.path} >= {"engine", "talker", "code2wav"}


@pytest.mark.long
async def test_qwen25_says_what_transformers_says(processes: Processes, bus: Bus) -> None:
    """Its engine and its talker are killed.

    The sound equals the sound of its vocoder alone, which `test_omni_vocoders.py` compares.
    """
    folder, question = processes.folder / "qwen25", QUESTIONS[1]
    # A stage that has ended its part before it is killed has none to take up again.
    for number in range(4):
        asking = asyncio.create_task(ask(bus, question, f"other{number}", "qwen25"))
        # No chunk is complete before the speech is, so its codes have a record a second.
        for stage, output, num_records in (("engine", "text", 3), ("talker", "codes", 1)):
            log = subjects.tokens(f"other{number}", output)
            await until_records(bus, subjects.TOKENS_STREAM, log, num_records)
            processes.kill(f"{stage} of qwen25")
        speech = await asking
        attempts = [{record.attempt for record in log} for log in (speech.text, speech.codes)]
        if min(map(len, attempts)) > 1:
            break
    assert min(map(len, attempts)) > 1
    prompt = omni.user_prompt(question)
    expected = omni.speak_qwen25(omni.reference_qwen25(folder), prompt, NUM_TOKENS, NUM_FRAMES)
    assert len(expected.frames) > 5
    vocoder = load_vocoder(
        folder, ChunkSpec(left=100, right=100), "a.stage", voices=omni.VOICES, dtype="float64"
    )
    codes = np.array(expected.frames, np.int32)
    whole = cut(vocoder, codes, Window(0, 0, len(codes), len(codes)), Speaker("Ethan", SEED))
    check(speech, expected, vocoder.synthesize([whole])[0])


async def test_an_answer_is_heard_before_it_is_written_and_all_stages_are_killed_then(
    processes: Processes, bus: Bus, answers: dict[str, omni.SpokenAnswer]
) -> None:
    """While the thinker stands still in the middle of its text, sound is made of what there is."""
    assert all(len(answer.frames) == NUM_FRAMES for answer in answers.values())
    for number in range(20):
        asking = asyncio.create_task(ask(bus, QUESTIONS[0], f"heard{number}"))
        if await is_heard_early(processes, bus, f"heard{number}"):
            break
        # The text was written too fast.
        check(await asking, answers[QUESTIONS[0]])
    else:
        pytest.fail("the thinker was never in the middle of its text")
    undisturbed = asyncio.create_task(ask(bus, QUESTIONS[1], "undisturbed"))
    speech = await asking
    check(speech, answers[QUESTIONS[0]])
    for records in speech:
        # On a busy machine one more may have been given up.
        assert len({record.attempt for record in records}) >= 2
    check(await undisturbed, answers[QUESTIONS[1]])
    await until_nothing_is_left(bus)


async def test_an_answer_about_an_image_is_spoken(processes: Processes, bus: Bus) -> None:
    """The encoder's embeddings go to the thinker, and to talkers, of which one is killed."""
    folder, image = processes.folder / "qwen3", draw_image(7, 90, 120)
    png = io.BytesIO()
    image.save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    messages = [Message("user", [ImagePart(ImageURL(url)), TextPart(QUESTIONS[1])])]
    asking = asyncio.create_task(ask(bus, messages, "seen"))
    await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens("seen", "codes"))
    processes.kill("talker")
    inputs = Qwen2VLImageProcessorPil.from_pretrained(folder)(image, return_tensors="pt")
    num_embeds = int(inputs["image_grid_thw"].prod()) // 4
    prompt: list[int] = []
    for token_id in Processor(ModelConfig(str(folder))).tokenize(Prompt(messages)):
        prompt += [token_id] * (num_embeds if token_id == omni.IMAGE else 1)
    model = omni.reference_qwen3(folder)
    expected = omni.speak_qwen3(model, prompt, NUM_TOKENS, NUM_FRAMES, **inputs)
    speech = await asking
    check(speech, expected)
    assert len({record.attempt for record in speech.codes}) >= 2
    await until_nothing_is_left(bus)


async def is_heard_early(processes: Processes, bus: Bus, request_id: str) -> bool:
    """Stop the thinker, wait for the first sound, and kill all three stages.

    Returns false, and kills none, if the text is whole by then.
    """
    text, audio = (subjects.tokens(request_id, output) for output in ("text", "audio"))
    # Before each frame a token is read, and the first chunk of sound takes four frames.
    await until_records(bus, subjects.TOKENS_STREAM, text, 6)
    with processes.stopped("engine"):
        if await is_written(bus, text):
            return False
        await until_records(bus, subjects.TOKENS_STREAM, audio)
        if await is_written(bus, text):
            return False
        for stage in ("engine", "talker", "code2wav"):
            processes.kill(stage)
    return True


async def is_written(bus: Bus, text: str) -> bool:
    stored = await bus.read(subjects.TOKENS_STREAM, text)
    records = [decode_record(message.data) for message in stored]
    deltas = [d for record in records if isinstance(record, TokenChunk) for d in record.choices]
    return any(delta.finish_reason is not None for delta in deltas)
