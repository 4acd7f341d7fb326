"""Models of random weights with 1, 32 and 256 streams: rates, times of a step, idle time."""

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from ops.gpu.load import SHAPES, TINY, Engine, Load, Shape, build, step_bytes
from ops.gpu.session import Session
from ops.gpu.timing import copy_rate, watch_device
from workers.engine.cuda.cuda_graphs import find_bucket
from workers.engine.cuda.kernels.compilations import CompiledKernels

NUM_STEPS = 24
NUM_IDLE_STEPS = 8
NUM_REPLAYS = 10


def run(session: Session) -> None:
    rate = copy_rate(session.device)
    loads = [Load(number, 512, 96) for number in (256, 1, 32)]
    workloads = [(SHAPES["7B"], loads), (SHAPES["1.5B"], loads)]
    if session.dry:
        workloads = [(TINY, [Load(2, 8, 3)])]
    for shape, loads in workloads:
        for load in loads:
            what = f"{shape.name}, {load.num_streams} streams"
            session.attempt(what, partial(_serve, session, what, shape, load, rate))


def _serve(session: Session, what: str, shape: Shape, load: Load, rate: float) -> None:
    gc.collect()
    session.empty_cache()
    if not session.dry:
        torch.cuda.reset_peak_memory_stats()
    model = build(shape, session.dtype, session.device)
    weight_bytes = step_bytes(model)
    began_s = time.perf_counter()
    engine = Engine(model, load)
    session.synchronize()
    values: dict[str, Any] = {"capture_s": time.perf_counter() - began_s}
    engine.measure()  # This compiles kernels and allocates workspaces.
    kernels = CompiledKernels()
    rates = engine.measure()
    num_late = kernels.num_compiled + kernels.num_cached
    session.add(f"{what}: no kernel is loaded after the warm-up", num_late == 0, kernels=num_late)
    values |= {"prefill_tok_s": rates.prefill, "decode_tok_s": rates.decode}
    if load.num_streams == 1:
        values |= {"of_weights": rates.decode * weight_bytes / rate, "goal": "of_weights >= 0.7"}
    if not session.dry:
        values |= {
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.memory_reserved() / 1e9,
        }
    session.add(what, **values)
    if not session.dry:
        _measure_steps(session, what, engine, load.num_streams)


def _measure_steps(session: Session, what: str, engine: Engine, num_streams: int) -> None:
    engine.prefill()
    engine.decode(NUM_IDLE_STEPS)
    walls, cpus = [], []
    for _ in range(NUM_STEPS):
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        engine.core.step()
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.thread_time() - cpu_s)
    values: dict[str, Any] = {"step_ms": median(walls) * 1e3, "host_cpu_ms": median(cpus) * 1e3}
    values["idle"] = watch_device(partial(engine.decode, NUM_IDLE_STEPS))
    if num_streams > 1:
        values["goal"] = "idle <= 0.05"
    session.add(f"{what}: a step", **values)
    session.add(f"{what}: its graph alone", ms=_time_graph(engine, num_streams))


def _time_graph(engine: Engine, num_streams: int) -> float:
    """Return the milliseconds of a recorded decode; the rest of a step is overhead."""
    core: Any = engine.core
    graphs = core._runner._model._graphs
    replay: Callable[[], object] = graphs._replays[find_bucket(num_streams, graphs._buckets)]
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    began.record()
    for _ in range(NUM_REPLAYS):
        replay()
    ended.record()
    ended.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return milliseconds / NUM_REPLAYS
