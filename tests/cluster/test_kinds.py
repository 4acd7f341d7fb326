"""A model of each kind in real processes, whose engine is killed in the middle of an answer.

The answer has the tokens of `generate` of transformers, in float64. CI runs a kind with recurrent
states and a kind with images, and `make tests-long` runs all of them.
"""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import LogRecord
from shared.protocol.requests import AudioPart, AudioURL, GenerateRequest, Message, TextPart
from shared.protocol.sampling import SamplingParams
from tests import whisper
from tests.cluster.conftest import until_ready
from tests.cluster.processes import running, until_nothing_is_left, until_records
from tests.cluster.streams import assert_gapless, attempts_of, tokens_of
from tests.engine.model.test_parity import draw_image, greedy_answer, make_case
from tests.engine.model.test_self_check import EXPERTS, write_folder
from tests.models import (
    sound_specs,
    test_generic,
    test_generic_images,
    test_generic_sounds,
    test_hybrids,
    test_whisper,
    vision_specs,
)
from tests.quantized_checkpoints import FORMS, Form, copy_quantized
from tests.sounds import Samples, draw_sound, file_of
from tests.support.slow_steps import slow_down
from workers.cli.ask import build_request
from workers.engine.model.check_folders import examine
from workers.engine.runner import ModelRunner
from workers.gateway.openai.transcription import plan_transcription
from workers.gateway.schemas.transcription import TranscriptionForm

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "tiny"
SPECS = test_generic.SPECS | test_hybrids.SPECS
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "engine": ["engine", "--model", MODEL],
}
ENCODER = {"encoder": ["encoder", "--model", MODEL]}
STEP_S = 0.05
"""Minimum time of a step, so that the engine can be killed in the middle of its work."""


def register_roles() -> None:
    slow_down(ModelRunner, "launch", STEP_S)


@dataclass(frozen=True)
class Question:
    folder: Path
    """Folder of the model."""
    request: GenerateRequest
    answer: list[int]
    """Tokens of the answer of transformers."""


@dataclass(frozen=True)
class Kind:
    ask: Callable[[Path], Question]
    """Function that writes a model to a folder, and computes an answer with transformers."""
    source: str = "generic"
    tower: str = "engine"


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def about_words(model_type: str, form: Form | None = None) -> Callable[[Path], Question]:
    def ask(folder: Path) -> Question:
        served = reference = folder / "model"
        write_folder(served, model_type, **SPECS[model_type])
        if form is not None:
            served, reference = copy_quantized(served, folder, form)
            assert examine(served).stored_as == form.label
        (served / "chat_template.jinja").write_text(TEMPLATE)
        prompt = make_case("killed", [], 90, 30).request
        model: Any = AutoModelForCausalLM.from_pretrained(reference, attn_implementation="eager")
        # `generate` bans the end token before the minimum length.
        model.generation_config.eos_token_id = None
        # The others have no float64.
        model.set_experts_implementation("eager")
        request = GenerateRequest(
            MODEL,
            sampling_params=sampling(30),
            prompt_token_ids=prompt.prompt_token_ids,
        )
        return Question(served, request, greedy_answer(model.double(), prompt))

    return ask


def about_an_image(model_type: str) -> Callable[[Path], Question]:
    def ask(folder: Path) -> Question:
        model = vision_specs.write_folder(folder, model_type)
        image = draw_image(1, 90, 60)
        image.save(folder / "image.png")
        request = build_request(MODEL, "See?", [folder / "image.png"])
        request = replace(request, sampling_params=sampling(test_generic_images.MAX_TOKENS))
        _, answer = test_generic_images.ask_transformers(folder, model, "See?", [image])
        return Question(folder, request, answer)

    return ask


def url_of(sound: Samples) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(file_of(sound)).decode()}"


def about_a_sound(model_type: str) -> Callable[[Path], Question]:
    def ask(folder: Path) -> Question:
        model = sound_specs.write_folder(folder, model_type)
        sound = draw_sound(1, 20_011)
        message = Message("user", [AudioPart(AudioURL(url_of(sound))), TextPart("Hear?")])
        params = sampling(test_generic_sounds.MAX_TOKENS)
        request = GenerateRequest(MODEL, [message], params)
        _, answer = test_generic_sounds.ask_transformers(folder, model, "Hear?", sound)
        return Question(folder, request, answer)

    return ask


def transcribe(folder: Path) -> Question:
    model = whisper.write_whisper(folder)
    sound = draw_sound(4, 20_000)
    plan = plan_transcription(TranscriptionForm(model=MODEL), [url_of(sound)])
    (request,) = plan.requests
    # The tokens of the language, of the task and of no timestamps begin the answer.
    max_tokens = test_whisper.MAX_TOKENS + 3
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    start, *answer = test_whisper.generate(folder, model, test_whisper.Question(sound, {}))
    assert start == whisper.START
    return Question(folder, replace(request, sampling_params=params), answer)


KINDS = {
    "generic": Kind(about_words("cohere2")),
    "states": Kind(about_words("qwen3_5_text")),
    "latents": Kind(about_words("deepseek_v3")),
    "sinks, in MXFP4": Kind(about_words("gpt_oss", EXPERTS)),
    "FP8": Kind(about_words("cohere", FORMS["fp8_blocks"])),
    "int4": Kind(about_words("cohere", FORMS["awq"])),
    "images": Kind(about_an_image("internvl"), tower="encoder"),
    "spans": Kind(about_an_image("gemma3")),
    "sounds": Kind(about_a_sound("qwen3_asr")),
    "cross attention": Kind(transcribe, source="native"),
}
ALWAYS = {"states", "images"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name in ALWAYS else pytest.mark.long)
        for name, kind in KINDS.items()
    ],
)
async def test_an_engine_killed_mid_answer(kind: Kind, tmp_path: Path) -> None:
    question = kind.ask(tmp_path)
    assert len(set(question.answer)) > 5, "or it would prove little"
    report = examine(question.folder)
    assert (report.reason, report.source) == (None, kind.source)
    config = f"""
models: {{{MODEL}: {{path: {question.folder}, dtype: float64, tower: {kind.tower}}}}}
engine: {{kv_cache_mib: 64}}
delivery: {{ack_wait_s: 2.0, retry_delay_s: 0.1}}
"""
    (tmp_path / "pagemill.yaml").write_text(config)
    workers = WORKERS | (ENCODER if kind.tower == "encoder" else {})
    with running(tmp_path, workers, __name__) as processes:
        bus = await Bus.connect(processes.url, "test")
        await until_ready(bus, workers)

        async def ask() -> list[LogRecord]:
            return [record async for record in client.ask(bus, question.request, "killed")]

        asking = asyncio.create_task(ask())
        await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens("killed", "text"), 2)
        processes.kill("engine")
        records = await asking
        assert_gapless(records)
        assert len(attempts_of(records)) > 1
        assert tokens_of(records) == question.answer
        await until_nothing_is_left(bus)
        await bus.close()
