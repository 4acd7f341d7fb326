"""Greedy tokens of the kernels in bfloat16 equal the tokens in float32, except near ties.

Tiles run on a processor that has some, and elsewhere on a model of them in software.
"""

import copy
import ctypes
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
)

from shared.models.registry import adapt
from shared.native import library
from shared.native.choices import Implementation
from tests.engine.cpu.test_native import needs_kernels
from tests.engine.model.test_parity import DEMO_MODEL, TEXT
from tests.shared.native.test_tiles import software_library
from workers.engine.cpu.decoder import NativeModel
from workers.engine.model.flat_model import BatchLayout, StepInputs

__all__ = ["software_library"]

NEAR_TIE = 0.05
"""Difference of two logits below which bfloat16 may prefer either."""
CHUNKS = [1, 2, 45, 8, 16, 17, 31]
"""Tokens of each step: of a decode, of drafts, and of prompts that fill tiles or do not."""
NUM_TOKENS = sum(CHUNKS)


@pytest.fixture
def kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Implementation], None]:
    """Let models use an implementation, which a processor without tiles runs in software."""

    def use(implementation: Implementation) -> None:
        loaded = library.load()
        assert loaded is not None
        if implementation == "tiles" and not loaded.pagemill_has_tiles():
            compiled = request.getfixturevalue("software_library")
            software = library._declare(ctypes.CDLL(str(compiled)))
            monkeypatch.setattr(library, "load", lambda: software)

    return use


def demo_model() -> tuple[PreTrainedModel, Tensor]:
    """The demo model, and its continuation of a prompt, where few tokens are near ties."""
    load: Any = Qwen2VLForConditionalGeneration.from_pretrained
    model = load(DEMO_MODEL, dtype=torch.bfloat16).eval().requires_grad_(False)
    exact = copy.deepcopy(model).float()
    start = torch.tensor([[4, 8, 15, 16, 23, 42]])
    config: Any = exact.generation_config
    config.eos_token_id = None
    ids = exact.generate(start, do_sample=False, max_new_tokens=NUM_TOKENS - start.shape[1])
    return model, ids[0]


def random_model() -> tuple[PreTrainedModel, Tensor]:
    """A model whose heads fill tiles, in groups of three."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**TEXT, **sizes}))
    # Wide weights separate the logits of tokens.
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 5
    ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,))
    return model.bfloat16().eval().requires_grad_(False), ids


def logits_of(native: NativeModel, ids: Tensor, num_axes: int) -> Tensor:
    """Compute the logits after each token [num_tokens, vocab_size], in steps of CHUNKS."""
    num_blocks = -(-len(ids) // 8)
    cache = native.new_cache(num_blocks, 8)
    logits = []
    for start, stop in pairwise([0, *accumulate(CHUNKS)]):
        plan = native.plan(BatchLayout([range(num_blocks)], [0, stop - start], [stop]), cache)
        positions = torch.arange(start, stop).expand(num_axes, -1)
        rows = torch.arange(stop - start)
        step = StepInputs(native.embed(ids[start:stop]), positions, plan, cache, rows)
        with torch.inference_mode():
            logits.append(native.forward(step))
    return torch.cat(logits)


@needs_kernels
@pytest.mark.parametrize("implementation", ["vector", "tiles"])
@pytest.mark.parametrize(("make", "num_axes"), [(demo_model, 3), (random_model, 1)])
def test_greedy_tokens_equal_float32_except_near_ties(
    make: Callable[[], tuple[PreTrainedModel, Tensor]],
    num_axes: int,
    implementation: Implementation,
    kernels: Callable[[Implementation], None],
    record_property: Callable[[str, object], None],
) -> None:
    model, ids = make()
    with torch.inference_mode():
        exact = copy.deepcopy(model).float()(ids[None]).logits[0]
    kernels(implementation)
    actual = logits_of(NativeModel(adapt(model), 2, implementation), ids, num_axes)
    greatest = exact.max(-1).values
    margins = greatest - exact.gather(1, actual.argmax(-1, keepdim=True))[:, 0]
    ties = {row: round(float(margins[row]), 4) for row in margins.nonzero()[:, 0].tolist()}
    record_property("near_ties", ties)
    assert len(ties) <= NUM_TOKENS // 20, ties
    assert max(ties.values(), default=0.0) < NEAR_TIE * float(exact.std(-1).mean()), ties
