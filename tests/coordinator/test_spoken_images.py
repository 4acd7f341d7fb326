"""Requests for spoken answers, with and without images in their prompts."""

import json
from typing import Any

import pytest

from shared.config.schema import ModelConfig
from shared.stage.pipelines import pipeline_of
from workers.coordinator.admission import Admitted, admit

MODELS = {"omni": ModelConfig("x", graph="qwen3-omni")}
PIPELINES = {"omni": pipeline_of(MODELS["omni"])}
IMAGE = {"type": "image_url", "image_url": {"url": "media:" + "0" * 64}}
WITH_IMAGE = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE]}]}
FEATURE = {"modality": "image", "mm_hash": "a", "offset": 0, "length": 1}
WITH_FEATURE = {"prompt_token_ids": [1, 2], "features": [FEATURE]}
PLAIN = {"messages": [{"role": "user", "content": "What?"}]}


def admit_omni(request: dict[str, Any], *outputs: str) -> Admitted:
    data = json.dumps({"model": "omni", "outputs": outputs, **request}).encode()
    return admit("pm.request.omni.r1", "r1", data, MODELS, PIPELINES)


@pytest.mark.parametrize("request_", [WITH_IMAGE, WITH_FEATURE, PLAIN])
def test_an_answer_is_spoken_if_it_is_asked_for(request_: dict[str, Any]) -> None:
    assert admit_omni(request_).outputs == []
    assert "audio" in admit_omni(request_, "text", "audio").outputs
