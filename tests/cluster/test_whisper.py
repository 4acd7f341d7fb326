"""Transcripts of a tiny Whisper by real processes, with the tokens of transformers in float64.

The engine is killed in the middle of an answer.
"""

import asyncio
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from openai import APIStatusError, AsyncOpenAI

from shared import client
from shared.bus.bus import Bus
from shared.client import pin_media
from shared.models.mel_layout import SAMPLE_RATE
from shared.protocol import subjects
from shared.protocol.records import LogRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from tests.cluster.processes import Processes, running, until_nothing_is_left, until_records
from tests.cluster.streams import assert_gapless, attempts_of, tokens_of
from tests.models.test_whisper import Question, generate
from tests.sounds import Samples, draw_sound
from tests.whisper import WINDOW_S, make_tokenizer, write_whisper
from workers.engine.runner import ModelRunner
from workers.gateway.openai.transcription import plan_transcription
from workers.gateway.schemas.transcription import TranscriptionForm
from workers.renderer.media.splitter import split_sound

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

MAX_TOKENS = 20
CONFIG = f"""
models:
  whisper:
    path: whisper
    dtype: float64
    sampling_defaults: {{max_tokens: {MAX_TOKENS}}}
engine: {{kv_cache_mib: 64}}
delivery: {{ack_wait_s: 2.0, drain_s: 5.0, retry_delay_s: 0.1}}
gateway: {{port: 0}}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "engine": ["engine", "--model", "whisper"],
    "gateway": ["gateway"],
}
STEP_S = 0.03
"""Minimum time of a step, so that the engine can be killed in the middle of its work."""


def register_roles() -> None:
    run = ModelRunner.run

    def slowly(self: ModelRunner, batch: Any) -> Any:
        time.sleep(STEP_S)
        return run(self, batch)

    # This process alone is a fork that runs an engine.
    ModelRunner.run = slowly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    (folder / "pagemill.yaml").write_text(CONFIG)
    (folder / "whisper").mkdir()
    return folder, write_whisper(folder / "whisper")


@pytest.fixture(scope="module")
def processes(reference: tuple[Path, Any]) -> Iterator[Processes]:
    with running(reference[0], WORKERS, __name__) as started:
        yield started


def rounded(samples: Samples) -> Samples:
    """Return the samples as a file of 16 bits has them."""
    return np.asarray(np.rint(samples * 2**15).clip(max=2**15 - 1) / 2**15, np.float32)


def file_of(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, "PCM_16", format="FLAC")
    return file.getvalue()


async def test_a_long_recording_is_written_down_in_pieces(
    reference: tuple[Path, Any], api: AsyncOpenAI
) -> None:
    folder, model = reference
    recording = rounded(draw_sound(3, 5 * SAMPLE_RATE))
    pieces = list(split_sound(iter([recording]), WINDOW_S))
    assert len(pieces) > 2
    kwargs = {"language": "de", "prompt": "Ann, Jörg"}
    tokenizer = make_tokenizer()
    texts: list[str] = []
    for piece in pieces:
        token_ids = generate(folder / "whisper", model, Question(rounded(piece), kwargs))
        # Four tokens begin a text after another one.
        start = token_ids.index(model.generation_config.decoder_start_token_id) + 4
        text = tokenizer.decode(token_ids[start:], skip_special_tokens=True)
        texts.append(f" {text}" if texts and text and not text[0].isspace() else text)
    transcribe: Any = api.audio.transcriptions.create
    file = ("a.flac", file_of(recording))
    answer = await transcribe(model="whisper", file=file, **kwargs)
    assert answer.text == "".join(texts).strip()
    with pytest.raises(APIStatusError, match="does not know the language ca"):
        await transcribe(model="whisper", file=file, language="ca")


async def test_an_engine_is_killed_in_the_middle_of_an_answer(
    reference: tuple[Path, Any], processes: Processes, bus: Bus
) -> None:
    folder, model = reference
    sound = rounded(draw_sound(4, 20_000))
    url = await pin_media(bus, file_of(sound), "")
    plan = plan_transcription(TranscriptionForm(model="whisper"), [url])
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS + 3)
    (planned,) = plan.requests
    request = GenerateRequest(
        "whisper",
        messages=planned.messages,
        template_kwargs=planned.template_kwargs,
        sampling_params=sampling,
    )

    async def ask() -> list[LogRecord]:
        return [record async for record in client.ask(bus, request, "killed")]

    asking = asyncio.create_task(ask())
    await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens("killed", "text"), 2)
    processes.kill("engine")
    records = await asking
    assert_gapless(records)
    assert len(attempts_of(records)) > 1
    start = [model.generation_config.decoder_start_token_id]
    assert start + tokens_of(records) == generate(folder / "whisper", model, Question(sound, {}))
    await until_nothing_is_left(bus)
