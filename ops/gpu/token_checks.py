"""Tokens of tiny models on the GPU against the CPU, with and without recorded graphs."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ops.gpu.models import build, text_request, widen
from ops.gpu.session import Session
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.cuda.cuda_graphs import Replay
from workers.engine.cuda.model import GpuModel
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.runner import ModelRunner

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 64, 16, 8, 128
CPU = torch.device("cpu")


class EagerModel(GpuModel):
    """A model on a GPU that records no graphs."""

    def capture(self, kv_cache: Any) -> None:
        return


def check_families(session: Session, names: Sequence[str]) -> None:
    """Compare the tokens of each family, greedy and sampled with a seed."""
    for name in names[:1] if session.dry else session.share_of(names):
        session.attempt(name, partial(_check_family, session, name))


def _check_family(session: Session, name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    widen(model)
    greedy = _text_requests(session, temperature=0)
    sampled = _text_requests(
        session,
        temperature=0.9,
        top_p=0.9,
        top_k=50,
        seed=3,
        repetition_penalty=1.1,
        logprobs=2,
    )
    compare_devices(session, f"{name}, greedy", model, greedy)
    compare_devices(session, f"{name}, sampled", model, sampled)
    if not session.dry:
        plain, graph = (
            answers(session, model, session.device, torch.bfloat16, graphs, greedy)
            for graphs in (False, True)
        )
        # Nearly equal logits may change places, so this is a measured value and not a check.
        same = _count_equal(plain, graph)
        session.add(f"{name}, bf16: same tokens with graphs", same=same, of=len(plain))


def _text_requests(session: Session, **params: Any) -> list[EngineRequest]:
    sampling = SamplingParams(max_tokens=2 if session.dry else 12, ignore_eos=True, **params)
    lengths = (3, 20) if session.dry else (1, 3, 17, 40, 60)
    return [text_request(i, length, sampling) for i, length in enumerate(lengths)]


def compare_devices(
    session: Session, what: str, model: PreTrainedModel, requests: Sequence[EngineRequest]
) -> None:
    """Check that the GPU yields the tokens of the CPU in float32, with and without graphs."""
    expected = answers(session, model, CPU, torch.float32, None, requests)
    plain = answers(session, model, session.device, torch.float32, False, requests)
    graph = answers(session, model, session.device, torch.float32, True, requests)
    session.add(
        f"{what}: tokens of the CPU, fp32",
        plain == expected and graph == plain,
        distinct=len({tuple(answer) for answer in expected}),
        same_as_cpu=_count_equal(plain, expected),
        same_with_graphs=_count_equal(graph, plain),
        of=len(expected),
    )


def _count_equal(answers: Iterable[list[int]], others: Iterable[list[int]]) -> int:
    return sum(answer == other for answer, other in zip(answers, others, strict=True))


def answers(
    session: Session,
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    graphs: bool | None,
    requests: Sequence[EngineRequest],
) -> list[list[int]]:
    """Return the tokens of each request.

    `graphs` is None for the model on torch, otherwise it says whether decodes are recorded.
    """
    family = adapt(copy.deepcopy(model).to(dtype).to(device))  # type: ignore[arg-type]
    tower = None
    if any(request.items for request in requests):
        assert family.tower is not None
        family.tower.optimize_layers(family.model, "torch")
        tower = Tower(family.tower, family.model)
    served: DecoderModel
    if graphs is None:
        served = FlatModel(family)
    else:
        kind = GpuModel if graphs else EagerModel
        record = _run_again if session.dry else None
        served = kind(family, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, record=record)
    core = EngineCore(
        ModelRunner(served, NUM_BLOCKS, BLOCK_SIZE, tower),
        lambda token_ids, /, *, skip_special_tokens=True: "x" * len(token_ids),
        frozenset(),
        pool=BlockPool(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=48,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=served.vocab_size,
    )
    return run_to_end(core, requests)


def _run_again(run: Replay) -> Replay:
    """Record as a graph does, on a machine without graphs: a replay runs the function."""
    return run


def run_to_end(core: EngineCore, requests: Sequence[EngineRequest]) -> list[list[int]]:
    """Return the tokens of each request. Raises the error of a request that fails."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise output.error
            for choice in output.choices:
                tokens[output.request_id] += choice.token_ids
    return list(tokens.values())
