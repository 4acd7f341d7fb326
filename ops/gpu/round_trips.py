"""Count the copies and the synchronisations of an engine step, without a GPU.

    python -m ops.gpu round-trips                     # all families
    python -m ops.gpu round-trips qwen2 -v
    python -m ops.gpu round-trips --kinds greedy images adapters

The model, its recorded decodes, the runner, the engine core and the sampler run on tensors of
torch's device `meta`, as `ops.gpu.trip_counter` describes it. Images come with embeddings;
`python -m ops.gpu part-trips` counts the towers.

An operation on tensors of both devices is an error, and so are a copy and a synchronisation in a
decode that a graph records. Each step is launched before the tokens of the step before are known,
so a copy or a synchronisation in between would make the host wait. The exit status is 1 if a family
has errors, or more copies and synchronisations in a step than `MOST`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from ops.gpu.models import FAMILIES, SEEING, build, image_request, text_request
from ops.gpu.trip_counter import DEVICE, Count, Record, counting, is_within, replace_launches
from shared.models.language import LanguageAdapter
from shared.models.registry import adapt
from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.cuda.cuda_graphs import Replay
from workers.engine.cuda.model import GpuModel
from workers.engine.model.lora import AdaptedLinear, Adapters
from workers.engine.model.peft_format import LoraWeights
from workers.engine.runner import ModelRunner

NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, MAX_MODEL_LEN, MAX_STEPS = 64, 16, 4, 128, 12
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "logit_bias": {5: 1.0},
    },
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    # Greedy requests with the embeddings of images, in families that see; with a LoRA adapter.
    "images": {"temperature": 0},
    "adapters": {"temperature": 0},
}
ADAPTED = ("llama", "qwen3_vl")
"""Families that are served with an adapter. Adapters replace layers in the same way in all."""
IMAGE_SIZES = [(4, 4), (8, 6)]
ADAPTER = "lora"
MOST = {
    "greedy": 1,
    "temperature": 1,
    "top_p": 6,
    "penalties": 14,
    "logprobs": 10,
    "images": 2.3,
    "adapters": 1,
}
"""Copies and synchronisations that a step may have, by the kind of sampling. They may only become
fewer. One of them fetches the tokens, and images bring copies of their embeddings."""


def recorder(record: Record) -> Callable[[Replay], Replay]:
    """Return a recorder of graphs, under which nothing may copy or synchronise."""

    def record_graph(run: Replay) -> Replay:
        run()
        record.is_recording = True
        try:
            output = run()
        finally:
            record.is_recording = False
        return lambda: output

    return record_graph


def serve(name: str, dtype: torch.dtype, record: Record, kinds: Sequence[str]) -> Iterator[Count]:
    """Serve requests; yield the copies and synchronisations of a step by kind of requests."""
    all_served: dict[bool, Served] = {}
    with counting(record):
        for kind in kinds:
            is_adapted = kind == "adapters"
            if (is_adapted and name not in ADAPTED) or (kind == "images" and name not in SEEING):
                continue
            if is_adapted not in all_served:
                all_served[is_adapted] = load(name, dtype, record, is_adapted)
            served = all_served[is_adapted]
            requests = requests_of(kind, served.width)
            record.clear()
            num_steps = run_requests(served.runner, requests)
            yield Count(kind, record.copies.total() / num_steps, record.syncs.total() / num_steps)


class Served(NamedTuple):
    runner: ModelRunner
    width: int
    """Width of the embeddings of an image; 0 for a family that does not see."""


def load(name: str, dtype: torch.dtype, record: Record, is_adapted: bool) -> Served:
    with DEVICE:
        model: Any = build(name)
    family = adapt(model.to(dtype))
    adapters = add_adapter(family) if is_adapted else None
    served = GpuModel(
        family,
        max_num_seqs=NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        adapted=is_adapted,
        record=recorder(record),
    )
    runner = ModelRunner(served, NUM_BLOCKS, BLOCK_SIZE, adapters=adapters)
    return Served(runner, 0 if family.tower is None else family.tower.width)


def add_adapter(family: LanguageAdapter) -> Adapters:
    """Add an adapter of rank 2 to a layer of the decoder."""
    adapters, decoder = Adapters([ADAPTER]), cast(Any, family.decoder)
    attention = decoder.layers[0].self_attn
    base = attention.q_proj
    weights = LoraWeights(
        base.weight.new_zeros(2, base.in_features), base.weight.new_zeros(base.out_features, 2)
    )
    attention.q_proj = AdaptedLinear(base, {1: weights}, 1, adapters.step)
    return adapters


def requests_of(kind: str, width: int) -> list[EngineRequest]:
    """Return three requests of a kind; `width` is the width of the embeddings of an image."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, **SAMPLING[kind])
    if kind == "images":
        return [embed(image_request(i, IMAGE_SIZES, sampling), width) for i in range(3)]
    adapter = ADAPTER if kind == "adapters" else None
    return [replace(text_request(i, 17 + 30 * i, sampling), adapter=adapter) for i in range(3)]


def embed(request: EngineRequest, width: int) -> EngineRequest:
    """Return the request with embeddings of its images, as from an encoder."""
    items = [
        replace(item, embedding=torch.ones(item.placeholder.length, width))
        for item in request.items
    ]
    return replace(request, items=items)


def run_requests(runner: ModelRunner, requests: Sequence[EngineRequest]) -> int:
    """Return the number of steps of the requests."""
    core = EngineCore(
        runner,
        lambda token_ids, /, *, skip_special_tokens=True: "x" * len(token_ids),
        frozenset(),
        pool=BlockPool(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=512,
        runs_ahead=True,
    )
    for request in requests:
        core.add(request)
    num_steps = 0
    while core.has_work and num_steps < MAX_STEPS:
        for output in core.step():
            if output.error is not None:
                raise output.error
        num_steps += 1
    return num_steps


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu round-trips", description=__doc__)
    parser.add_argument("families", nargs="*", help=f"by default all: {', '.join(FAMILIES)}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kinds", nargs="+", default=list(SAMPLING), choices=list(SAMPLING))
    parser.add_argument("-v", "--verbose", action="store_true", help="print each with its line")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.families) - set(FAMILIES):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    right = []
    for name in arguments.families or FAMILIES:
        record = Record()
        replace_launches(record)
        counts = serve(name, dtype, record, arguments.kinds)
        right.append(is_within(MOST, name, counts, record, verbose=arguments.verbose))
    return int(not all(right))
