"""A small real model, where there is one: SmolLM2-135M-Instruct answers as in transformers.

python -m ops.bench.models smollm2 FOLDER
PAGEMILL_SMOLLM2=FOLDER pytest tests/engine/model/test_real_weights.py

Other runs deselect these tests.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from shared.config.schema import EngineConfig, ModelConfig
from shared.native.choices import KernelSetting
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core

FOLDER = os.environ.get("PAGEMILL_SMOLLM2")
QUESTIONS = [
    "What is the capital of France?",
    "Name the four seasons.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
]

pytestmark = [
    pytest.mark.needs_folder("PAGEMILL_SMOLLM2"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(FOLDER), dtype=torch.float32)
    model.eval()
    return model


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    """All at once; the model's own end included."""
    params = SamplingParams(temperature=0, max_tokens=48)
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(str(i), prompt, [], params))
    token_ids: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step():
            assert output.error is None
            for delta in output.choices:
                token_ids[int(output.request_id)] += delta.token_ids
    return token_ids


@pytest.mark.parametrize("kernels", ["measured", "torch"])
def test_outputs_equal_the_outputs_of_transformers(reference: Any, kernels: KernelSetting) -> None:
    folder = Path(str(FOLDER))
    engine = EngineConfig(kernels=kernels, max_num_batched_tokens=48)
    model = ModelConfig(path=str(folder), dtype="float32", max_model_len=512)
    core = build_core(load(model, engine), engine)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    expected = [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=48, do_sample=False, repetition_penalty=1.0
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert answers(core, prompts) == expected
    assert "Paris" in tokenizer.decode(expected[0])
