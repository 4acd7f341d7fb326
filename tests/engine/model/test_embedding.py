"""Embeddings of the engine against transformers' last hidden states, in float32."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import ContextTooLong, InvalidRequest, WorkerFailure
from shared.models.registry import adapt
from shared.native import library
from shared.protocol.records import Usage
from shared.protocol.requests import EmbeddingParams
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import NUM_TEXT_IDS, TEXT, build, widen
from tests.fakes import ShakyDrafter
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    LAST_TOKEN,
    Batch,
    EngineRequest,
    Pooling,
    RequestOutput,
    ScheduledSequence,
    Sequence,
)
from workers.engine.core.step_budget import MAX_PROMPT_LOGITS
from workers.engine.cpu.decoder import NativeModel
from workers.engine.launched_batch import LaunchedBatch
from workers.engine.model.flat_model import DecoderModel, FlatModel, StepInputs
from workers.engine.pooling import pool
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN_SIZE = TEXT["hidden_size"]
NUM_BLOCKS, BLOCK_SIZE = 64, 8
MAX_MODEL_LEN = 64
needs_kernels = pytest.mark.skipif(library.load() is None, reason="no compiler, or no AVX-512")


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2_vl", "qwen3_vl"])
def reference(request: pytest.FixtureRequest) -> Any:
    model = build(request.param)
    widen(model)
    return model.requires_grad_(False).eval()


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_kernels)])
def served(request: pytest.FixtureRequest, reference: Any) -> DecoderModel:
    family = adapt(copy.deepcopy(reference))
    return FlatModel(family) if request.param == "torch" else NativeModel(family, 1)


def core_of(
    served: DecoderModel,
    budget: int,
    runner: ModelRunner | None = None,
    pooling: Pooling = LAST_TOKEN,
    num_blocks: int = NUM_BLOCKS,
) -> EngineCore:
    return make_core(
        runner or ModelRunner(served, num_blocks, BLOCK_SIZE),
        BlockPool(num_blocks, BLOCK_SIZE),
        served.vocab_size,
        pooling=pooling,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        new_drafter=lambda: ShakyDrafter(lambda _: 1, random.Random(0), NUM_TEXT_IDS),
        max_drafting_tokens=budget,
    )


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert core.stats().num_free_blocks == core.stats().num_blocks
    return outputs


def request_for(name: str, prompt: list[int], params: EmbeddingParams | None) -> EngineRequest:
    return EngineRequest(name, prompt, [], SamplingParams(max_tokens=4), embedding=params)


def expected(
    reference: Any,
    prompt: list[int],
    dimensions: int | None,
    normalize: bool | None,
    mode: str = "last",
) -> Any:
    with torch.no_grad():
        states = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = (states.mean(dim=0) if mode == "mean" else states[-1])[:dimensions]
    return (pooled / pooled.norm() if normalize else pooled).numpy()


@pytest.mark.parametrize("budget", [7, 64])
def test_embeddings_are_the_last_hidden_states(
    reference: Any, served: DecoderModel, budget: int
) -> None:
    """Beside other requests and drafts, in chunks, from the prefix cache, in a full context."""
    rng = random.Random(budget)
    lengths = (1, 4, 9, 23, MAX_MODEL_LEN)
    prompts = [[rng.randrange(NUM_TEXT_IDS) for _ in range(n)] for n in lengths]
    prompts += prompts[-1][:20], prompts[-1][:17]
    dimensions_of = (None, 1, 5, 64, 24, None, 3)
    params = [EmbeddingParams(dimensions=d, normalize=d != 5) for d in dimensions_of]
    requests = [
        request_for(f"e{i}", *pair) for i, pair in enumerate(zip(prompts, params, strict=True))
    ]
    others = [request_for(f"t{i}", prompt, None) for i, prompt in enumerate(prompts[2:4])]
    core = core_of(served, budget)
    alone = run(core, others)
    outputs = run(core, [*requests[:3], *others, *requests[3:]])
    for request in requests:
        (output,) = outputs[request.request_id]
        assert request.embedding is not None
        dimensions, normalize = request.embedding.dimensions, request.embedding.normalize
        right = expected(reference, request.prompt_token_ids, dimensions, normalize)
        embedding = np.frombuffer(output.embedding, "<f4")
        assert embedding.shape == (dimensions or HIDDEN_SIZE,)
        assert np.linalg.norm(embedding - right) <= 1e-5 * np.linalg.norm(right)
        assert output.choices == []
        assert output.usage is not None
        assert output.usage == Usage(len(request.prompt_token_ids), 0, output.usage.cached_tokens)
    assert core.stats().prefix_hit_tokens > 0
    for request in others:
        tokens = [
            [
                token
                for output in results[request.request_id]
                for token in output.choices[0].token_ids
            ]
            for results in (alone, outputs)
        ]
        assert tokens[0] == tokens[1]


MEAN = Pooling("mean")


def assert_mean(
    reference: Any, request: EngineRequest, output: RequestOutput, *, normalize: bool = True
) -> None:
    assert request.embedding is not None
    prompt, dimensions = request.prompt_token_ids, request.embedding.dimensions
    right = expected(reference, prompt, dimensions, normalize, "mean")
    embedding = np.frombuffer(output.embedding, "<f4")
    assert np.linalg.norm(embedding - right) <= 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("budget", [7, 64])
def test_mean_pooling_covers_every_token(reference: Any, served: DecoderModel, budget: int) -> None:
    """Beside other requests, in chunks, and with a prefix that the cache has."""
    rng = random.Random(budget)
    prompts = [[rng.randrange(NUM_TEXT_IDS) for _ in range(n)] for n in (1, 9, 23, MAX_MODEL_LEN)]
    prompts += prompts[-1][:40], prompts[-1][:40]
    requests = [
        request_for(f"e{i}", prompt, EmbeddingParams(dimensions=(None, 5)[i % 2]))
        for i, prompt in enumerate(prompts)
    ]
    core = core_of(served, budget, pooling=MEAN)
    run(core, [request_for("cached", prompts[-1], None)])
    text = request_for("text", prompts[-1][:33], None)
    outputs = run(core, [*requests[:3], text, *requests[3:]])
    for request in requests:
        (output,) = outputs[request.request_id]
        assert_mean(reference, request, output)
        assert output.usage == Usage(len(request.prompt_token_ids), 0, 0)
    assert core.stats().prefix_hit_tokens > 0, "the text has found the cached prefix"


@pytest.mark.parametrize("pooling", [LAST_TOKEN, MEAN], ids=["last", "mean"])
def test_pooled_rows_have_no_logits_and_no_limit_but_the_budget(
    reference: Any, served: DecoderModel, pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_logits, forward = [], served.forward

    def counted(step: StepInputs) -> Any:
        logits = forward(step)
        num_logits.append(len(logits))
        return logits

    monkeypatch.setattr(served, "forward", counted)
    prompts = [[first, *range(1, 60)] for first in range(100, 108)]
    assert sum(map(len, prompts)) > MAX_PROMPT_LOGITS
    requests = [request_for(f"e{i}", prompt, EmbeddingParams()) for i, prompt in enumerate(prompts)]
    text = EngineRequest("text", [1, 2, 3], [], SamplingParams(max_tokens=1))
    core = core_of(served, 512, pooling=pooling)
    outputs = run(core, [text, *requests[:7]]) | run(core, [requests[7]])
    assert num_logits == [1, 0]
    for request in requests:
        right = expected(reference, request.prompt_token_ids, None, True, pooling.mode)
        embedding = np.frombuffer(outputs[request.request_id][0].embedding, "<f4")
        assert np.linalg.norm(embedding - right) <= 1e-5


def test_a_sum_that_is_not_finite_has_no_mean() -> None:
    request = request_for("e", [1, 2], EmbeddingParams())
    sequence = Sequence(request, 0, 0, [1, 2], 1, pooling=MEAN)
    states = torch.full((2, HIDDEN_SIZE), 3e38)
    with pytest.raises(ArithmeticError, match="not finite"):
        pool(states, [ScheduledSequence(sequence, 2, samples=True)])
    assert not sequence.embedding


def test_mean_pooling_begins_again_after_a_preemption(reference: Any, served: DecoderModel) -> None:
    core = core_of(served, 7, pooling=MEAN, num_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    texts = [
        EngineRequest(f"t{i}", [1 + i, 2, 3], [], SamplingParams(max_tokens=30)) for i in range(3)
    ]
    request = request_for("e", [*range(1, 36)], EmbeddingParams())
    (output,) = run(core, [*texts, request])["e"]
    assert core.stats().num_preemptions > 0
    assert_mean(reference, request, output)


def test_mean_pooling_counts_the_tokens_of_a_repeated_step_once(
    reference: Any, served: DecoderModel
) -> None:
    class Failing(ModelRunner):
        def launch(self, batch: Batch) -> LaunchedBatch:
            launched = super().launch(batch)
            if any(s.sequence.request_id == "bad" for s in batch.scheduled):
                launched.sample(range(len(batch.scheduled)))
                raise RuntimeError("a poisoned request")
            return launched

    core = core_of(served, 12, Failing(served, NUM_BLOCKS, BLOCK_SIZE), MEAN)
    requests = [
        request_for(name, [*range(1, 30)], EmbeddingParams()) for name in ("good", "better")
    ]
    core.add(requests[0])
    core.step()
    outputs = run(core, [request_for("bad", [5, 6], None), requests[1]])
    assert isinstance(outputs["bad"][-1].error, WorkerFailure)
    for request in requests:
        assert_mean(reference, request, outputs[request.request_id][-1])


def test_the_model_decides_on_normalization_unless_the_request_does(
    reference: Any, served: DecoderModel
) -> None:
    core = core_of(served, 64, pooling=Pooling("mean", normalize=False))
    for number, normalize in enumerate((None, False, True)):
        request = request_for(f"e{number}", [1, 2, 3], EmbeddingParams(normalize=normalize))
        (output,) = run(core, [request])[request.request_id]
        assert_mean(reference, request, output, normalize=bool(normalize))


def test_more_dimensions_than_the_model_has_are_refused(served: DecoderModel) -> None:
    params = EmbeddingParams(dimensions=HIDDEN_SIZE + 1)
    with pytest.raises(InvalidRequest, match=str(HIDDEN_SIZE)) as caught:
        core_of(served, 64).add(request_for("e", [1, 2], params))
    assert caught.value.field == "embedding.dimensions"


def test_a_prompt_over_the_context_is_refused(served: DecoderModel) -> None:
    core = core_of(served, 64)
    with pytest.raises(ContextTooLong, match=r"65 tokens, more than .* context of 64"):
        core.add(request_for("e", [1] * (MAX_MODEL_LEN + 1), EmbeddingParams()))


def test_states_that_are_not_finite_are_neither_returned_nor_shared(
    reference: Any, served: DecoderModel
) -> None:
    class Spoilt(ModelRunner):
        def launch(self, batch: Batch) -> LaunchedBatch:
            for s in batch.scheduled:
                if s.sequence.request_id == "bad" and s.sequence.num_computed_tokens:
                    for keys, _ in self._kv_cache:
                        keys[s.sequence.block_table] = torch.nan
            return super().launch(batch)

    core = core_of(served, 12, Spoilt(served, NUM_BLOCKS, BLOCK_SIZE))
    prompt, params = [*range(1, 20)], EmbeddingParams()
    (failed,) = run(core, [request_for("bad", prompt, params)])["bad"]
    assert isinstance(failed.error, WorkerFailure)
    (output,) = run(core, [request_for("good", prompt, params)])["good"]
    assert core.stats().prefix_hit_tokens == 0
    right = expected(reference, prompt, None, normalize=True)
    assert np.linalg.norm(np.frombuffer(output.embedding, "<f4") - right) <= 1e-5
