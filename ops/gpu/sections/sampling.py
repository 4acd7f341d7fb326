"""The sampler alone on 256 rows of 151,936 logits: its time, and the idle time of the GPU."""

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
from workers.engine.sampling.verifier import draw_batch

NUM_RUNS = 12
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p and top_k": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
    "logprobs": {"temperature": 0, "logprobs": 3},
}


def run(session: Session) -> None:
    shape = (3, 1000) if session.dry else (256, 151936)
    logits = 3 * torch.randn(shape, device=session.device).to(session.dtype)
    for name, params in KINDS.items():
        what = f"{shape[0]} rows, {name}"
        session.attempt(what, partial(_measure, session, what, logits, params))


@torch.inference_mode()
def _measure(session: Session, what: str, logits: Tensor, params: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, **params)
    scheduled = []
    for i in range(len(logits)):
        request = EngineRequest(f"r{i}", [1, 2, 3], [], sampling)
        scheduled.append(ScheduledSequence(Sequence(request, 0, i, [1, 2, 3, 5, 7], 90), 1, True))
    times = []
    for _ in range(2 if session.dry else NUM_RUNS):
        began_s = time.perf_counter()
        draw_batch(logits, scheduled).result()
        times.append(time.perf_counter() - began_s)
    values = {"ms": median(times) * 1e3}
    if not session.dry:
        values["idle"] = watch_device(
            lambda: [draw_batch(logits, scheduled).result() for _ in range(4)]
        )
    session.add(what, **values)
