"""Measure the engine on a GPU: kernels, whole models, and the overhead between steps.

    python -m ops.bench.gpu              # needs a CUDA device; about ten minutes on an H200
    python -m ops.bench.gpu --dry-run    # anywhere: tiny shapes in Triton's interpreter, no goals

Kernels are compared with torch's, and with the speed of a copy within the device's memory in the
same run; models with transformers' continuous batching, on the same random weights. Figures of a
dry run mean nothing: it shows that everything runs.
"""

import argparse
import gc
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ops.harness.tables import console, print_table

if TYPE_CHECKING:
    from ops.gpu.kernel_times import Figure, Span
    from ops.gpu.load import Load, Shape

ATTENTION_GOAL = "goal: decode of 64 x 4k at 80 % of the copy's bandwidth or more"
GOALS = {
    "one stream, decode": "70 % or more of what reading the weights allows",
    "many streams, decode": "2.00 or more",
    "GPU idle in decode": "below 5 %",
}
IDLE_STEPS = 16
KERNEL_COLUMNS = (
    "workload", "ours", "of the copy's bandwidth", "TFLOP/s", "others, and the ratio",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    dry = parser.parse_args().dry_run
    if dry:
        # This comes before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not dry and not torch.cuda.is_available():
        raise SystemExit("ops.bench.gpu: there is no CUDA device here; try --dry-run")
    console.print(f"torch {torch.__version__}, {_device_name(dry)}")
    bandwidth = report_kernels(dry)
    for shape, one, many in workloads(dry):
        report_model(shape, one, many, bandwidth, dry)


def _device_name(dry: bool) -> str:
    import torch

    return "dry run on the CPU" if dry else torch.cuda.get_device_name()


def spans(dry: bool) -> list["Span"]:
    """Return the shapes: decodes, then chunks of prefills."""
    from ops.gpu.kernel_times import Span

    if dry:
        return [Span(2, 40, 1), Span(1, 20, 8)]
    return [
        Span(64, 4095, 1),
        Span(1, 32767, 1),
        Span(256, 1023, 1),
        Span(1, 0, 4096),
        Span(1, 4096, 2048),
    ]


def workloads(dry: bool) -> list[tuple["Shape", "Load", "Load"]]:
    """Measure a model with one stream and with many."""
    from ops.gpu.load import SHAPES, TINY, Load

    if dry:
        return [(TINY, Load(1, 8, 3), Load(3, 8, 3))]
    return [(shape, Load(1, 512, 128), Load(256, 512, 128)) for shape in SHAPES]


# -- kernels --------------------------------------------------------------------------------------


def report_kernels(dry: bool) -> float:
    """Return the bandwidth of a copy, in bytes per second."""
    import torch

    from ops.gpu.kernel_times import Heads, copy_bandwidth, measure_attention, measure_elementwise

    device = torch.device("cpu" if dry else "cuda")
    dtype = torch.float32 if dry else torch.bfloat16
    bandwidth = copy_bandwidth(2**20 if dry else 2**32, device)
    console.print(f"a copy moves {bandwidth / 1e12:.3f} TB/s, reads and writes together")
    all_heads = [Heads("tiny", 4, 2, 64)]
    if not dry:
        all_heads = [Heads("1.5B", 12, 2, 128), Heads("7B", 28, 4, 128)]
    rows = [
        _kernel_row(measure_attention(heads, span, dtype, device, peers=not dry), bandwidth)
        for heads in all_heads
        for span in spans(dry)
    ]
    print_table(f"attention, {ATTENTION_GOAL}", KERNEL_COLUMNS, rows)
    rows = [
        _kernel_row(figure, bandwidth)
        for num_tokens in ((2,) if dry else (256, 8192))
        for figure in measure_elementwise(num_tokens, 64 if dry else 3584, dtype, device)
    ]
    print_table("small operations, all bound by memory", KERNEL_COLUMNS, rows)
    return bandwidth


def _kernel_row(figure: "Figure", bandwidth: float) -> tuple[str, ...]:
    others = [
        f"{name}: {at}" if isinstance(at, str) else f"{name}: {_us(at)}, {at / figure.ours_s:.2f}"
        for name, at in figure.others_s.items()
    ]
    return (
        figure.name,
        _us(figure.ours_s),
        _percent(figure.num_bytes / figure.ours_s / bandwidth),
        f"{figure.num_flops / figure.ours_s / 1e12:.1f}" if figure.num_flops else "",
        "\n".join(others),
    )


# -- models ---------------------------------------------------------------------------------------


def report_model(shape: "Shape", one: "Load", many: "Load", bandwidth: float, dry: bool) -> None:
    import torch

    from ops.gpu.load import Engine, build, measure_transformers, step_bytes
    from ops.gpu.timing import watch_device

    device = torch.device("cpu" if dry else "cuda")
    model: Any = build(shape, torch.float32 if dry else torch.bfloat16, device)
    limit = bandwidth / step_bytes(model)
    # Each runs twice, because a first run compiles and allocates workspaces.
    theirs = [[measure_transformers(model, load) for _ in range(2)][-1] for load in (one, many)]
    del model
    ours, idle = [], []
    for load in (one, many):
        _give_back()
        engine = Engine(build(shape, torch.float32 if dry else torch.bfloat16, device), load)
        ours.append([engine.measure() for _ in range(2)][-1])
        if not dry:
            engine.prefill()
            idle.append(watch_device(partial(engine.decode, IDLE_STEPS)))
        del engine
    _give_back()

    share = ours[0].decode / limit
    rows = [
        (
            "one stream, decode",
            f"{ours[0].decode:,.0f} tok/s, {_percent(share)} of {limit:,.0f}",
            f"{theirs[0].decode:,.0f} tok/s",
            _ratio(ours[0].decode, theirs[0].decode),
            GOALS["one stream, decode"],
        )
    ]
    for name, kind in (("many streams, decode", "decode"), ("many streams, prefill", "prefill")):
        mine, other = getattr(ours[1], kind), getattr(theirs[1], kind)
        rates = (f"{mine:,.0f} tok/s", f"{other:,.0f} tok/s", _ratio(mine, other))
        rows.append((f"{name}, {many.num_streams}", *rates, GOALS.get(name, "")))
    for load, share in zip((one, many), idle, strict=False):
        name = "GPU idle in decode"
        rows.append((f"{name}, {load.num_streams}", _percent(share), "", "", GOALS[name]))
    print_table(shape.name, ("workload", "engine", "transformers", "ratio", "goal"), rows)


def _give_back() -> None:
    """Free the last model's memory before the next one is loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else ""


if __name__ == "__main__":
    main()
