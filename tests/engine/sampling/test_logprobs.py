"""Log probabilities against transformers' own logits, of answers and of prompts."""

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from shared.protocol.records import TokenLogprobs
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import IMAGE, PROCESSOR, Case, Twins, make_case, make_twins
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import LoggedChoice, RequestOutput
from workers.engine.runner import ModelRunner
from workers.engine.sampling import row_chunks
from workers.engine.sampling.logprobs import IMPOSSIBLE, logprobs_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "qwen2_vl"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


def test_each_row_gets_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_LOGITS", 80)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = logits.float().log_softmax(-1)
    entries = logprobs_of(logits, [2, 0, 0], [7, 3, 39], [0, 3, 50])
    for logprobs, row, token_id, num_tops in zip(
        entries, [2, 0, 0], [7, 3, 39], [0, 3, 40], strict=True
    ):
        check(logprobs, expected[row], token_id, num_tops)


def test_impossible_tokens_have_a_finite_logprob() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    (entry,) = logprobs_of(logits, [0], [1], [3])
    assert (entry.logprob, entry.rank) == (IMPOSSIBLE, 3)
    assert msgspec.json.decode(msgspec.json.encode(entry), type=TokenLogprobs) == entry


def check(entry: TokenLogprobs, expected: Tensor, token_id: int, num_tops: int) -> None:
    assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
    assert entry.rank == 1 + int((expected > expected[token_id]).sum())
    tops = expected.topk(num_tops)
    assert len(entry.top_token_ids) == num_tops
    torch.testing.assert_close(torch.tensor(entry.top_logprobs), tops.values, atol=1e-4, rtol=1e-4)
    # Among equals in bfloat16 any order will do.
    torch.testing.assert_close(expected[entry.top_token_ids], tops.values)


# -- through the engine ---------------------------------------------------------------------------

NUM_TOPS, NUM_PROMPT_TOPS = 4, 2


def ask(case: Case, **params: object) -> Case:
    sampling = msgspec.structs.replace(
        case.request.sampling, logprobs=NUM_TOPS, prompt_logprobs=NUM_PROMPT_TOPS, **params
    )
    return replace(case, request=replace(case.request, sampling=sampling))


def new_core(twins: Twins, num_blocks: int = 100, budget: int = 64) -> EngineCore:
    runner = ModelRunner(twins.served, num_blocks, 4, twins.tower)
    return make_core(
        runner, BlockPool(num_blocks, 4), twins.served.vocab_size, max_num_batched_tokens=budget
    )


def run(core: EngineCore, *cases: Case) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {case.request.request_id: [] for case in cases}
    for case in cases:
        core.add(case.request)
    while core.has_work:
        for output in core.step():
            assert output.error is None
            outputs[output.request_id].append(output)
    return outputs


def reference(twins: Twins, case: Case, answer: list[int]) -> Tensor:
    """Log probabilities after each token: [num_tokens, vocab_size]."""
    token_ids = torch.tensor([case.request.prompt_token_ids + answer])
    inputs = {}
    if case.images:
        inputs = dict(PROCESSOR(case.images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (token_ids == IMAGE).int()
    logits: Tensor = twins.reference(input_ids=token_ids, **inputs).logits[0]
    return logits.float().log_softmax(-1)


def check_answer(twins: Twins, case: Case, outputs: list[RequestOutput], choice: int = 0) -> None:
    deltas = [delta for output in outputs for delta in output.choices if delta.index == choice]
    answer = [token_id for delta in deltas for token_id in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    expected = reference(twins, case, answer)[len(case.request.prompt_token_ids) - 1 :]
    for returned, row, token_id in zip(logprobs, expected, answer, strict=False):
        check(returned, row, token_id, NUM_TOPS)
    assert len(logprobs) == len(answer)


def check_prompt(twins: Twins, case: Case, outputs: list[RequestOutput]) -> None:
    of_outputs = [output.prompt_logprobs for output in outputs]
    assert of_outputs[1:] == [None] * (len(of_outputs) - 1), "once, and first"
    assert of_outputs[0] is not None
    prompt = case.request.prompt_token_ids
    for entry, row, token_id in zip(
        of_outputs[0], reference(twins, case, []), prompt[1:], strict=False
    ):
        check(entry, row, token_id, NUM_PROMPT_TOPS)
    assert len(of_outputs[0]) == len(prompt) - 1


@pytest.mark.parametrize(("budget", "num_blocks"), [(64, 100), (7, 17)], ids=["whole", "preempted"])
def test_logprobs_belong_to_the_unprocessed_distribution(
    twins: Twins, budget: int, num_blocks: int
) -> None:
    sizes = [(60, 60)] if twins.sees else []
    cases = [
        ask(make_case("greedy", sizes, 9, 12)),
        ask(make_case("sampled", sizes, 9, 12), temperature=1.5, top_k=3, repetition_penalty=1.5),
        ask(make_case("biased", [], 5, 9), logit_bias={3: 50.0}, n=2),
        ask(make_case("one token", [], 1, 5)),
    ]
    outputs = run(new_core(twins, num_blocks, budget), *cases)
    for case in cases:
        of_case = outputs[case.request.request_id]
        check_prompt(twins, case, of_case)
        for choice in range(case.request.sampling.n):
            check_answer(twins, case, of_case, choice)


def test_prompt_logprobs_are_complete_with_a_warm_cache(twins: Twins) -> None:
    core = new_core(twins)
    case = make_case("cached", [], 23, 6)
    run(core, case)
    again = ask(case)
    outputs = run(core, again)["cached"]
    check_prompt(twins, again, outputs)
    usages = [outputs[-1].usage, run(core, case)["cached"][-1].usage]
    assert [usage and usage.cached_tokens for usage in usages] == [0, 20]


def test_a_resume_returns_the_rest_without_prompt_logprobs(twins: Twins) -> None:
    case = ask(make_case("resumed", [], 9, 12), temperature=1.0)
    whole = run(new_core(twins), case)["resumed"]
    deltas = [delta for output in whole for delta in output.choices]
    cut = random.Random(0).randint(1, 10)
    logged = [LoggedChoice([t for d in deltas[:cut] for t in d.token_ids], False)]
    resumed = replace(case, request=replace(case.request, logged=logged))
    outputs = run(new_core(twins), resumed)["resumed"]
    assert all(output.prompt_logprobs is None for output in outputs)
    rest = [delta for output in outputs for delta in output.choices]
    assert [d.token_ids for d in rest] == [d.token_ids for d in deltas[cut:]]
    for resumed_delta, expected in zip(rest, deltas[cut:], strict=True):
        assert resumed_delta.logprobs is not None
        assert expected.logprobs is not None
        assert resumed_delta.logprobs[0].logprob == pytest.approx(
            expected.logprobs[0].logprob, abs=1e-4
        )


def test_logprobs_are_returned_only_on_request(twins: Twins) -> None:
    outputs = run(new_core(twins), make_case("plain", [], 9, 3))["plain"]
    assert all(o.prompt_logprobs is None and o.choices[0].logprobs is None for o in outputs)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, ignore_eos=True)
    case = make_case("only its own", [], 9, 3)
    case = replace(case, request=replace(case.request, sampling=params))
    for output in run(new_core(twins), case)["only its own"]:
        logprobs = output.choices[0].logprobs
        assert logprobs is not None
        (entry,) = logprobs
        assert (entry.rank, entry.top_token_ids) == (1, [])
