"""Transcripts of a tiny Whisper by real processes, with the tokens of transformers in float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI

from shared.models.mel_layout import SAMPLE_RATE
from tests.cluster.processes import Processes, running
from tests.models.test_whisper import Question, generate
from tests.sounds import Samples, draw_sound, file_of
from tests.whisper import WINDOW_S, make_tokenizer, write_whisper
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
gateway: {{port: 0}}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "engine": ["engine", "--model", "whisper"],
    "gateway": ["gateway"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    (folder / "pagemill.yaml").write_text(CONFIG)
    (folder / "whisper").mkdir()
    return folder, write_whisper(folder / "whisper")


@pytest.fixture(scope="module")
def processes(reference: tuple[Path, Any]) -> Iterator[Processes]:
    with running(reference[0], WORKERS) as started:
        yield started


def rounded(samples: Samples) -> Samples:
    """Return the samples as a file of 16 bits has them."""
    return np.asarray(np.rint(samples * 2**15).clip(max=2**15 - 1) / 2**15, np.float32)


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
    file = ("a.flac", file_of(recording, "FLAC", "PCM_16"))
    answer = await transcribe(model="whisper", file=file, **kwargs)
    assert answer.text == "".join(texts).strip()
    with pytest.raises(APIStatusError, match="does not know the language ca"):
        await transcribe(model="whisper", file=file, language="ca")
