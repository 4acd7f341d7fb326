"""Expected speeches of the requests of a plan, by an undisturbed talker and in one piece."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ops.chaos import fake_model
from ops.chaos.expected_answers import AT_ONCE, NUM_BLOCKS, Expected, cached, run_alone
from ops.chaos.plan import ROOT, TALKER, VOCODER, Planned, Settings
from shared.config.schema import Config, ModelConfig
from shared.protocol.pipeline import StageSpec
from shared.stage.pipelines import pipelines_of
from workers.engine.code_output import CodeOutput, stage_output
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Vocoder, cut
from workers.generator.loader import TABLE_FILE, load_vocoder


class ExpectedSpeech(Struct):
    """Codes and samples of an expected speech."""

    codes: list[int]
    sound: bytes
    """16 bits a sample, least significant byte first."""


def expect_speeches(
    settings: Settings,
    config: Config,
    planned: Sequence[Planned],
    answers: Mapping[str, Expected],
) -> dict[str, ExpectedSpeech]:
    """Return the expected speeches by request id; `answers` are the expected answers."""
    texts = {entry.id: _text_of(entry, answers) for entry in planned if entry.speaks}
    if not texts:
        return {}
    by_text = _speak(settings, config, sorted(set(texts.values())))
    return {id: by_text[text] for id, text in texts.items()}


def _text_of(planned: Planned, answers: Mapping[str, Expected]) -> str:
    text = planned.request.given_text
    return text if text is not None else answers[planned.id].choices[0].text


def _speak(settings: Settings, config: Config, texts: list[str]) -> dict[str, ExpectedSpeech]:
    """Return the speech of each text, cached if the talker is a real one."""
    name, model = next(iter(config.models.items()))
    pipeline = pipelines_of(config)[name]
    talker, generator = pipeline.stage(TALKER), pipeline.stage(VOCODER)
    assert talker is not None
    assert generator is not None
    path, chunks = generator.path, generator.chunks
    assert path is not None
    assert chunks is not None
    assert talker.path is not None
    folder = Path(talker.path)
    files = [*sorted(folder.iterdir()), folder.parent / TABLE_FILE]
    for package in ("engine", "generator"):
        files += sorted((ROOT / "workers" / package).rglob("*.py"))

    def compute() -> dict[str, ExpectedSpeech]:
        vocoder = load_vocoder(Path(path), chunks, VOCODER)
        core, output = _build_talker(settings, config, model, talker)
        return {
            text: ExpectedSpeech(codes, _sound_of(vocoder, codes))
            for text, codes in _codes_of(core, output, texts).items()
        }

    return cached(settings, [texts, talker], files, dict[str, ExpectedSpeech], compute)


def _build_talker(
    settings: Settings, config: Config, model: ModelConfig, stage: StageSpec
) -> tuple[EngineCore, CodeOutput]:
    bus: Any = None
    if settings.engine == "fake":
        core = fake_model.build_talker(0.0, NUM_BLOCKS, AT_ONCE)
        return core, fake_model.code_output(bus, stage)
    from workers.engine.loader import load
    from workers.engine.main import build_core

    assert stage.path is not None
    engine = replace(config.engine, max_num_seqs=AT_ONCE, num_blocks=NUM_BLOCKS)
    loaded = load(ModelConfig(stage.path, dtype=model.dtype), engine, speaks=True)
    output = stage_output(bus, stage, loaded, TALKER)
    assert isinstance(output, CodeOutput)
    return build_core(loaded, engine), output


def _codes_of(core: EngineCore, output: CodeOutput, texts: list[str]) -> dict[str, list[int]]:
    voice = next(iter(output.voices.values()))
    requests = (
        EngineRequest(str(number), [*output.encode(text), voice], [], output.sampling)
        for number, text in enumerate(texts)
    )
    answers = run_alone(core, requests)
    return {
        text: [
            code for (code,) in output.codes.frames_of(answers[str(number)].choices[0].token_ids)
        ]
        for number, text in enumerate(texts)
    }


def _sound_of(vocoder: Vocoder, codes: list[int]) -> bytes:
    if not codes:
        return b""
    frames = np.array(codes, np.int32)[:, None]
    window = Window(0, 0, len(frames), len(frames))
    return vocoder.synthesize([cut(vocoder, frames, window)])[0].astype("<i2").tobytes()
