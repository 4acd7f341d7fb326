"""The sampler alone on 256 rows of 151,936 logits: its tokens, its time, the idle time of the GPU.

Filters are compared with a definition in float64, processors with the sampler of the CPU. The
logits of these checks are multiples of 1/8, so that rounding moves no threshold.
"""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ops.gpu.session import Session
from ops.gpu.timing import watch_device
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import EngineRequest, ScheduledSequence, Sequence
from workers.engine.cuda.sampler import DeviceSampler
from workers.engine.sampling.sampler import point_of
from workers.engine.sampling.verifier import draw_batch

NUM_RUNS = 12
LOGPROB_ERROR = 1e-4
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p and top_k": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
    "logprobs": {"temperature": 0, "logprobs": 3},
}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_p": 0.9, "top_k": 40},
    {"top_p": 0.95, "temperature": 0.5},
    # Too many tokens are left for the candidates.
    {"top_p": 0.9, "temperature": 9.0},
    {"min_p": 0.02, "top_k": 5000, "top_p": 0.7},
]
PROCESSORS: list[dict[str, Any]] = [
    {**PENALTIES, "presence_penalty": 4.0},
    {"logit_bias": {5: 20.0, 6: -1.0}},
    {"allowed_token_ids": [3, 5, 700], "min_tokens": 9},
]


def run(session: Session) -> None:
    shape = (3, 1000) if session.dry else (256, 151936)
    logits = 3 * torch.randn(shape, device=session.device)
    steps = (8 * logits).round() / 8
    few = steps[:16]
    for params in FILTERS:
        session.attempt(f"filters {params}", partial(_check_filters, session, steps, params))
    for params in PROCESSORS:
        session.attempt(f"processors {params}", partial(_check_processors, session, few, params))
    logits = logits.to(session.dtype)
    for name, params in KINDS.items():
        what = f"{shape[0]} rows, {name}"
        session.attempt(what, partial(_measure, session, what, logits, params))


@torch.inference_mode()
def _check_filters(session: Session, logits: Tensor, params: dict[str, Any]) -> None:
    scheduled = _schedule(len(logits), params)
    drawn = DeviceSampler(session.device).draw(logits, scheduled).result()
    tokens = [sampled[0].token_id for sampled in drawn]
    points = torch.tensor([point_of(s.sequence) for s in scheduled], dtype=torch.float64)
    expected = draw_by_definition(logits.double(), scheduled[0], points.to(logits.device))
    num_wrong = sum(token != right for token, right in zip(tokens, expected, strict=True))
    session.add(f"filters {params}", num_wrong == 0, num_wrong=num_wrong)


def draw_by_definition(logits: Tensor, s: ScheduledSequence, points: Tensor) -> list[int]:
    """Return the token of each row at its point, by the filters one after the other in float64."""
    params, vocab_size = s.sequence.request.sampling, logits.shape[1]
    weights = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).exp()
    weights *= weights >= params.min_p
    ordered = weights.sort(-1, descending=True).values
    last = min(params.top_k or vocab_size, vocab_size) - 1
    weights *= weights >= ordered[:, last : last + 1]
    ordered *= ordered >= ordered[:, last : last + 1]
    masses = ordered.cumsum(-1)
    first = (masses < params.top_p * masses[:, -1:] - 1e-9).sum(-1, keepdim=True)
    weights *= weights >= ordered.gather(1, first)
    ends = weights.cumsum(-1)
    token_ids: list[int] = (ends <= points[:, None] * ends[:, -1:]).sum(-1).tolist()
    return token_ids


@torch.inference_mode()
def _check_processors(session: Session, logits: Tensor, params: dict[str, Any]) -> None:
    """Compare greedy tokens and their log probabilities in two steps."""
    samplers = DeviceSampler(session.device).draw, draw_batch
    inputs = logits, logits.cpu()
    batches = [_schedule(len(logits), {"temperature": 0, "logprobs": 2} | params) for _ in inputs]
    for _ in range(2):
        actual, expected = (
            [row[0] for row in draw(rows, batch).result()]
            for draw, rows, batch in zip(samplers, inputs, batches, strict=True)
        )
        num_wrong, error = 0, 0.0
        for one, other in zip(actual, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            num_wrong += one.token_id != other.token_id or one.logprobs.rank != other.logprobs.rank
            error = max(error, abs(one.logprobs.logprob - other.logprobs.logprob))
        is_right = num_wrong == 0 and error < LOGPROB_ERROR
        session.add(f"processors {params}", is_right, num_wrong=num_wrong, error=error)
        for batch in batches:
            for s, token in zip(batch, expected, strict=True):
                s.sequence.token_ids.append(token.token_id)


def _schedule(number: int, params: dict[str, Any]) -> list[ScheduledSequence]:
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, **params)
    scheduled = []
    for i in range(number):
        request = EngineRequest(f"r{i}", [1, 2, 3], [], sampling)
        sequence = Sequence(request, 0, i, [1, 2, 3, 5, 7], 90, end_token_ids=(5,))
        scheduled.append(ScheduledSequence(sequence, 1, True))
    return scheduled


@torch.inference_mode()
def _measure(session: Session, what: str, logits: Tensor, params: dict[str, Any]) -> None:
    scheduled, sampler = _schedule(len(logits), params), DeviceSampler(session.device)
    times = []
    for _ in range(2 if session.dry else NUM_RUNS):
        began_s = time.perf_counter()
        sampler.draw(logits, scheduled).result()
        times.append(time.perf_counter() - began_s)
    values = {"ms": median(times) * 1e3}
    if not session.dry:
        values["idle"] = watch_device(
            lambda: [sampler.draw(logits, scheduled).result() for _ in range(4)]
        )
    session.add(what, **values)
