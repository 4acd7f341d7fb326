"""The plain loop as a peer: transformers' `generate`, one request after the other."""

import asyncio
import itertools
import os
import time
from typing import Any

import torch
from transformers import StoppingCriteriaList

from ops.bench.gateway.transports import Prepared, Times
from ops.bench.peers.protocol import Setup
from ops.bench.peers.transformers import load_model

# It has no presence penalty, and no grammar.
KNOWN = ("temperature", "top_p", "top_k", "repetition_penalty")


class PlainLoop:
    def __init__(self, model: str, float32: bool) -> None:
        self._model: Any = load_model(Setup(model, os.cpu_count() or 1))
        if float32:
            self._model.float()
        self._turn = asyncio.Lock()

    async def __call__(self, prepared: Prepared) -> Times:
        began_s = time.perf_counter()
        async with self._turn:
            return await asyncio.to_thread(self._generate, prepared, began_s)

    @torch.inference_mode()
    def _generate(self, prepared: Prepared, began_s: float) -> Times:
        stamps: list[float] = []

        def note_time(token_ids: Any, scores: Any, **_: Any) -> Any:
            stamps.append(time.perf_counter() - began_s)
            return torch.zeros(len(token_ids), dtype=torch.bool)

        fields = {name: prepared.fields[name] for name in KNOWN if name in prepared.fields}
        token_ids = torch.tensor([prepared.request.token_ids])
        self._model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=prepared.request.max_tokens,
            do_sample=bool(fields),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_time]),
            **fields,
        )
        gaps = tuple(after - before for before, after in itertools.pairwise(stamps))
        return Times(stamps[0], stamps[-1], gaps)
