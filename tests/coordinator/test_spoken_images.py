"""Images in the prompts of answers that are to be spoken."""

import json
from typing import Any

import pytest

from shared.config.schema import ModelConfig
from shared.errors import UnsupportedContent
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


@pytest.mark.parametrize(
    ("request_", "field"),
    [(WITH_IMAGE, "messages[0].content[1]"), (WITH_FEATURE, "features")],
)
def test_an_answer_about_an_image_is_written_and_not_spoken(
    request_: dict[str, Any], field: str
) -> None:
    assert admit_omni(request_).outputs == []
    with pytest.raises(UnsupportedContent, match="ask for text alone") as refused:
        admit_omni(request_, "text", "audio")
    assert refused.value.field == field


def test_an_answer_to_a_text_is_spoken() -> None:
    assert "audio" in admit_omni(PLAIN, "text", "audio").outputs
