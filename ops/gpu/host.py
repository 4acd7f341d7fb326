"""Measure the processor time and the Python calls of an engine step, without a GPU.

    python -m ops.gpu host
    python -m ops.gpu host --sequences 256 --sampling greedy --profile
    python -m ops.gpu host --device-ms 7.6

The engine core, its scheduler, the runner, the plan of the kernels and the sampler run over a model
that computes nothing, and no kernel chooses the tokens. All sequences decode. For each number of
sequences and kind of sampling this prints the medians of the processor time and of the time of a
step, and its Python calls, which are the same on every machine.

With `--device-ms` each batch takes this time on a device that computes one batch after the other,
while the interpreter is free. The next step is launched before the tokens of a step are awaited,
and the share of the time in which the device is idle is printed too. Run it on a machine that does
nothing else.
"""

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import Batch, EngineRequest, SampledToken
from workers.engine.cuda.kernels.plan import BlockTables, KernelPlan, plan_for_kernels
from workers.engine.cuda.kernels.sampling import CHOSEN
from workers.engine.cuda.kernels.tiling import Tiling
from workers.engine.cuda.sampler import DeviceSampler
from workers.engine.launched_batch import LaunchedBatch
from workers.engine.model.attention import KVCache
from workers.engine.model.flat_model import BatchLayout, DecoderModel, StepInputs
from workers.engine.runner import ModelRunner

VOCAB_SIZE, HIDDEN_SIZE, BLOCK_SIZE = 1024, 8, 16
MAX_NEW, MAX_SEQUENCES = 512, 512
NUM_WARM_UPS, NUM_COUNTED = 10, 5
MAX_STEPS = MAX_NEW - 100
NUM_PROFILED_LINES = 30
TILING = Tiling.of(28, [(4, 128)], torch.bfloat16)
"""Tiling of a decoder of 7B."""
OUTCOME = torch.tensor([[1, CHOSEN]]).repeat(MAX_SEQUENCES, 1)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
}


class NullFamily:
    """Language adapter of a model with three axes of positions and no layers."""

    num_position_rows = 3
    position_type = "int64"
    attends_items = False

    def __init__(self) -> None:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 0}
        self.model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
        self.decoder = SimpleNamespace(config=SimpleNamespace(**sizes), **vars(self.model))
        self._rows = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)

    def input_embeddings(self, token_ids: Tensor) -> Tensor:
        return self._rows[token_ids]

    def check(self, request: EngineRequest) -> None:
        return

    def count_free_positions(self, request: EngineRequest) -> int:
        return MAX_NEW

    def spans_of(self, request: EngineRequest) -> list[tuple[int, int]]:
        return []


class NullModel(DecoderModel):
    """Decoder that plans as a GPU model does, without values."""

    def __init__(self) -> None:
        family: Any = NullFamily()
        super().__init__(family)
        self.draw = DeviceSampler(self.device, choose_nothing).draw
        self._tables = BlockTables()
        self._logits = torch.zeros(MAX_SEQUENCES, VOCAB_SIZE)

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return [
            (torch.zeros(num_blocks, block_size, 1, 1), torch.zeros(num_blocks, block_size, 1, 1))
        ]

    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> KernelPlan:
        return plan_for_kernels(
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            block_size=BLOCK_SIZE,
            tiling=TILING,
            device=self.device,
            tables=self._tables,
        )

    def forward(self, step: StepInputs) -> Tensor:
        return self._logits[: len(step.sampled_rows)]


def choose_nothing(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return token 1 for each row, without a kernel."""
    return OUTCOME[: len(logits)]


class NullRunner(ModelRunner):
    """Runner whose batches are computed one after the other by a device that needs no processor."""

    def __init__(self, num_blocks: int, device_s: float) -> None:
        super().__init__(NullModel(), num_blocks, BLOCK_SIZE)
        self.device_s = device_s
        self.free_s = 0.0
        """Time at which the device has computed all batches."""

    def launch(self, batch: Batch) -> LaunchedBatch:
        launched: Any = super().launch(batch)
        self.free_s = max(self.free_s, time.perf_counter()) + self.device_s
        return DeviceBatch(launched, self.free_s) if self.device_s else launched


class DeviceBatch(LaunchedBatch):
    """A batch that the device has computed at a given time."""

    def __init__(self, launched: LaunchedBatch, done_s: float) -> None:
        vars(self).update(vars(launched))
        self._done_s = done_s

    def result(self) -> list[list[SampledToken]]:
        time.sleep(max(0.0, self._done_s - time.perf_counter()))
        return super().result()


def start(num_sequences: int, context: int, params: dict[str, Any], device_s: float) -> EngineCore:
    """Return a core in which this number of sequences decode."""
    num_blocks = num_sequences * (-(-(context + MAX_NEW) // BLOCK_SIZE) + 3)
    core = EngineCore(
        NullRunner(num_blocks, device_s),
        lambda token_ids, /, *, skip_special_tokens=True: "x" * len(token_ids),
        frozenset(),
        pool=BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192,
        max_model_len=context + MAX_NEW,
        vocab_size=VOCAB_SIZE,
        runs_ahead=device_s > 0,
    )
    sampling = SamplingParams(max_tokens=MAX_NEW, ignore_eos=True, **params)
    for i in range(num_sequences):
        prompt = [(i * 7919 + j) % VOCAB_SIZE for j in range(context)]
        core.add(EngineRequest(f"r{i}", prompt, [], sampling))
    started: set[str] = set()
    while len(started) < num_sequences:
        started |= {output.request_id for output in core.step() if output.choices}
    for _ in range(NUM_WARM_UPS):
        core.step()
    return core


def profile(core: EngineCore, num_steps: int) -> pstats.Stats:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        core.step()
    profiler.disable()
    return pstats.Stats(profiler)


def count_calls(core: EngineCore) -> float:
    """Return the Python calls of a step."""
    stats: Any = profile(core, NUM_COUNTED)
    return float(stats.total_calls) / NUM_COUNTED


def measure(core: EngineCore, num_steps: int, device_s: float) -> str:
    cpus, walls = [], []
    for _ in range(num_steps):
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        core.step()
        cpus.append(time.thread_time() - cpu_s)
        walls.append(time.perf_counter() - wall_s)
    step_s = median(walls)
    idle = f", the device idle for {max(0.0, 1 - device_s / step_s):.0%}" if device_s else ""
    times = f"{median(cpus) * 1e3:6.2f} ms of processor, {step_s * 1e3:6.2f} ms"
    return f"{times}, {count_calls(core):7,.0f} calls{idle}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu host", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--sampling", nargs="+", default=list(SAMPLING), choices=SAMPLING)
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="measured steps")
    parser.add_argument("--device-ms", type=float, default=0.0, help="time of a step on a device")
    parser.add_argument("--profile", action="store_true", help="print a profile instead of times")
    arguments = parser.parse_args(argv)
    if arguments.steps > MAX_STEPS or max(arguments.sequences) > MAX_SEQUENCES:
        parser.error(f"at most {MAX_STEPS} steps and {MAX_SEQUENCES} sequences")
    torch.set_num_threads(1)
    device_s = arguments.device_ms / 1e3
    for number in arguments.sequences:
        for name in arguments.sampling:
            core = start(number, arguments.context, SAMPLING[name], device_s)
            sys.stdout.write(f"{number:4} sequences, {name:12} ")
            if arguments.profile:
                stats = profile(core, arguments.steps).sort_stats("cumulative")
                stats.print_stats(NUM_PROFILED_LINES)
            else:
                sys.stdout.write(f"{measure(core, arguments.steps, device_s)}\n")
            sys.stdout.flush()
    return 0
