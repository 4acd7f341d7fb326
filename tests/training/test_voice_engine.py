"""The demo's voice on the engine: its configuration, and the codes that were recorded."""

import json
from pathlib import Path
from typing import Any, cast

from ops.training.voice.judging import CODES_FILE
from shared.config.schema import EngineConfig, ModelConfig
from shared.stage.pipelines import pipeline_of
from workers import settings
from workers.engine.code_output import CodeOutput, stage_output
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded"


def test_the_engine_says_the_recorded_codes_in_one_batch() -> None:
    config = settings.load_config(ROOT / "ops" / "demo_voice" / "pagemill.yaml")
    settings.check_paths(config)
    pipeline = pipeline_of(config.models["demo"])
    assert pipeline.with_text_given.voices == ["alloy"]
    stage = pipeline.stage("talker")
    assert stage is not None
    assert stage.path is not None
    engine = EngineConfig(kv_cache_mib=64)
    loaded = load(ModelConfig(stage.path), engine, speaks=True)
    output = stage_output(cast(Any, None), stage, loaded, "the stage")
    assert isinstance(output, CodeOutput)
    core = build_core(loaded, engine)
    spoken: dict[str, list[int]] = json.loads((RECORDED / CODES_FILE).read_text())
    for text in spoken:
        prompt = [*output.encode(text), output.voices["alloy"]]
        core.add(EngineRequest(text, prompt, [], output.sampling))
    codes_by_text: dict[str, list[int]] = {text: [] for text in spoken}
    while core.has_work:
        for step in core.step():
            assert step.error is None
            for delta in step.choices:
                frames = output.codes.frames_of(delta.token_ids)
                codes_by_text[step.request_id] += [code for (code,) in frames]
                assert delta.finish_reason in (None, "stop")
    assert codes_by_text == spoken
