"""Count the copies and the synchronisations of an engine step, without a GPU.

    python -m ops.gpu round-trips                     # all families
    python -m ops.gpu round-trips qwen2 -v
    python -m ops.gpu round-trips --kinds greedy images adapters

The model, its recorded decodes, the runner, the engine core and the sampler run on tensors of
torch's device `meta`, which have a shape and a dtype and no values. Triton kernels are not
launched. A read of a value by the host is a synchronisation; it returns a value with which no row
needs special treatment. A copy between the host and the device is counted with the line that causes
it, unless it is asynchronous. Images come with embeddings, because a tower reads the grids of its
images from the device.

An operation on tensors of both devices is an error, and so are a copy and a synchronisation in a
decode that a graph records. Each step is launched before the tokens of the step before are known,
so a copy or a synchronisation in between would make the host wait. The exit status is 1 if a family
has errors, or more copies and synchronisations in a step than `MOST`.
"""

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from ops.gpu.models import FAMILIES, SEEING, build, image_request, text_request
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

DEVICE = torch.device("meta")
NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, MAX_MODEL_LEN, MAX_STEPS = 64, 16, 4, 128, 12
NUM_PROBLEMS = 12
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
    "top_p": 1,
    "penalties": 1,
    "logprobs": 1,
    "images": 2.3,
    "adapters": 1,
}
"""Copies and synchronisations that a step may have, by the kind of sampling. They may only become
fewer. One of them fetches the tokens, and images bring copies of their embeddings."""


class Record:
    """Copies and synchronisations with their lines, and problems."""

    def __init__(self) -> None:
        self.is_recording = False
        self.copies: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()

    def add_copy(self, kind: str) -> None:
        self._add(self.copies, f"copy {kind}")

    def add_sync(self, kind: str) -> None:
        self._add(self.syncs, kind)

    def _add(self, counter: Counter[str], kind: str) -> None:
        event = f"{kind} at {find_line()}"
        counter[event] += 1
        if self.is_recording:
            self.problems[f"in a recorded decode: {event}"] += 1

    def add_mixed(self, function: object) -> None:
        self.problems[f"tensors of two devices in {function} at {find_line()}"] += 1


def find_line() -> str:
    """Return the innermost line that is neither in this file nor in torch."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            name = frame.filename.split("site-packages/")[-1].removeprefix(f"{os.getcwd()}/")
            return f"{name}:{frame.lineno}"
    return "?"


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE.type


class ConstructorCounter(TorchFunctionMode):
    """Counts tensors that are made of lists on the device, and indexes that are lists.

    Below this level, torch copies neither to `meta`.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("tensor", "as_tensor") and not isinstance(args[0], Tensor):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == DEVICE.type:
                self._record.add_copy("cpu>meta")
        if name in ("__getitem__", "__setitem__") and is_on_device(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                if isinstance(part, list):
                    self._record.add_copy("cpu>meta")
        return function(*args, **kwargs)


class OperationCounter(TorchDispatchMode):
    """Counts copies and reads of values, and answers the reads."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode, operations that consist of others arrive whole.
        with self:
            output = function.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            return self._copy(function, args, kwargs)
        if not any(map(is_on_device, tree_leaves(args))):
            return function(*args, **kwargs)
        if (answer := ANSWERS.get(name)) is not None:
            self._record.add_sync(name.removeprefix("_"))
            return answer(*args, **kwargs)
        if name in ("index", "index_put_"):
            self._check_index(args[1])
        elif any(isinstance(each, Tensor) and is_foreign(each) for each in tree_leaves(args)):
            self._record.add_mixed(function)
        output = function(*args, **kwargs)
        if name == "any":
            output.holds = False
        return output

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function.overloadpacket.__name__ == "copy_":
            target, source = args[:2]
            is_waiting = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if is_on_device(target) != is_on_device(source) and source.ndim and is_waiting:
                self._record.add_copy(f"{source.device.type}>{target.device.type}")
            return target if is_on_device(source) else function(*args, **kwargs)
        source, device = args[0], kwargs.get("device", args[0].device)
        if is_on_device(source) and device.type != DEVICE.type:
            self._record.add_sync("to_host")
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        is_upload = not is_on_device(source) and device.type == DEVICE.type
        if is_upload and not kwargs.get("non_blocking"):
            self._record.add_copy("cpu>meta")
        return function(*args, **kwargs)

    def _check_index(self, index: Sequence[Tensor | None]) -> None:
        for part in index:
            if part is None:
                continue
            if part.dtype == torch.bool:
                self._record.add_sync("index by a mask")
            elif is_foreign(part):
                self._record.add_copy("cpu>meta")


def is_foreign(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host; operations take its value if it is a scalar."""
    return tensor.device.type != DEVICE.type and tensor.ndim > 0


def _read_scalar(tensor: Tensor) -> bool | int | float:
    """Return a condition that needs no special treatment: `all` holds, and `any` does not."""
    if tensor.dtype == torch.bool:
        holds: bool = getattr(tensor, "holds", True)
        return holds
    return 1.0 if tensor.dtype.is_floating_point else 1


def _find_nothing(tensor: Tensor) -> Tensor:
    return torch.empty(0, tensor.ndim, dtype=torch.int64, device=DEVICE)


def _keep_all(
    tensor: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unique values, as if all values were different."""
    values = tensor.flatten()
    indexes = torch.empty(tensor.shape, dtype=torch.int64, device=DEVICE)
    return values, indexes, indexes.flatten()


ANSWERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _read_scalar,
    "nonzero": _find_nothing,
    "_unique2": _keep_all,
}


def replace_launches(record: Record) -> None:
    """Check that the tensors of a kernel are on the device, instead of launching it."""

    def launch(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        for name, value in zip(function.arg_names, args, strict=False):
            if isinstance(value, Tensor) and not is_on_device(value):
                record.problems[f"kernel {function.__name__}: {name} is on {value.device}"] += 1

    JITFunction.run = launch


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


def serve(
    name: str, dtype: torch.dtype, record: Record, kinds: Sequence[str]
) -> Iterator[tuple[str, float, float]]:
    """Serve requests; yield the copies and synchronisations of a step by kind of requests."""
    all_served: dict[bool, Served] = {}
    with ConstructorCounter(record), OperationCounter(record):
        for kind in kinds:
            is_adapted = kind == "adapters"
            if (is_adapted and name not in ADAPTED) or (kind == "images" and name not in SEEING):
                continue
            if is_adapted not in all_served:
                all_served[is_adapted] = load(name, dtype, record, is_adapted)
            served = all_served[is_adapted]
            requests = requests_of(kind, served.width)
            record.copies.clear()
            record.syncs.clear()
            num_steps = run_requests(served.runner, requests)
            yield kind, record.copies.total() / num_steps, record.syncs.total() / num_steps


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


def check_family(name: str, dtype: torch.dtype, kinds: Sequence[str], verbose: bool) -> bool:
    """Print the counts of a family; return whether it has no problems."""
    record = Record()
    replace_launches(record)
    try:
        for kind, copies, syncs in serve(name, dtype, record, kinds):
            say(f"  {name:13} {kind:12} {copies:5.1f} copies, {syncs:5.1f} synchronisations a step")
            if copies + syncs > MOST[kind]:
                record.problems[f"{kind}: more than {MOST[kind]} a step"] += 1
            for event, count in (record.copies + record.syncs).items() if verbose else ():
                say(f"      {count:4} {event}")
    except Exception as error:
        cause = error.__cause__ or error
        say(f"{name}: FAILED with {type(cause).__name__}: {str(cause)[:300]}")
        for frame in traceback.extract_tb(cause.__traceback__)[-8:]:
            say(f"      {frame.filename.split('site-packages/')[-1]}:{frame.lineno} {frame.name}")
        return False
    say(f"{name}: {'PROBLEMS' if record.problems else 'ok'}")
    for problem, count in record.problems.most_common(NUM_PROBLEMS):
        say(f"      {problem}, {count} times")
    return not record.problems


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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
    right = [
        check_family(name, dtype, arguments.kinds, arguments.verbose)
        for name in arguments.families or FAMILIES
    ]
    return int(not all(right))
