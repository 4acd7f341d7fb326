"""A position beyond the rotary table, the device by NVML, the measured KV cache, a step without
memory and, at the end, a lost context."""

import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from ops.gpu.load import Engine, Load, Shape, build
from ops.gpu.session import Session
from shared.config.schema import EngineConfig, ModelConfig
from shared.gpu.meter import find_own_gpu
from workers.engine.cuda.kernels.norm import rms_norm
from workers.engine.cuda.kernels.rotary import Rotary, rotate_and_write
from workers.engine.cuda.profiling import ClaimedMemory, Profile
from workers.engine.loader import load
from workers.engine.main import build_core, size_cache
from workers.settings import DEMO_MODEL

SMALL = Shape("small", 1024, 2816, 4, 8, 2, 32000, True)
FREE_BYTES = 24 << 20


def run(session: Session) -> None:
    session.attempt("a position beyond the rotary table", partial(_check_position, session))
    if not session.dry:
        session.attempt("the device of this process", partial(_find_device, session))
        session.attempt("the measured KV cache", partial(_size_cache, session))
        session.attempt("a step without memory", partial(_take_memory, session))
        _lose_context(session)


def _check_position(session: Session) -> None:
    """Read beyond a table that is the beginning of a larger one, all of it allocated here."""
    device, dtype = session.device, session.dtype
    cos = torch.full((4096, 64), 7.0, device=device, dtype=dtype)
    cos[:128] = 1
    sin = torch.zeros_like(cos)
    axes = torch.zeros(64, dtype=torch.int32, device=device)
    keys, values = (torch.zeros(1, 16, 2, 128, device=device, dtype=dtype) for _ in range(2))
    query = rotate_and_write(
        torch.ones(1, 8, 128, device=device, dtype=dtype),
        torch.full((3, 1), 1000, device=device),
        Rotary(cos[:128], sin[:128], axes),
        keys,
        values,
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    cosine = float(query[0, 0, 0])
    session.add("position 1000 of a table of 128 stays within it", cosine == 1, cosine=cosine)


def _find_device(session: Session) -> None:
    own, uuid = find_own_gpu(), torch.cuda.get_device_properties(0).uuid
    found = None if own is None else own.uuid
    session.add("NVML and CUDA name one device", found == f"GPU-{uuid}", nvml=found, cuda=str(uuid))


def _size_cache(session: Session) -> None:
    """Measure the steps of the demo model, and run them again over the cache that is left."""
    limit = 2 << 30
    engine = EngineConfig(device="cuda", gpu_memory="2 GiB", max_num_seqs=32)
    memory = ClaimedMemory.claim(engine)
    assert memory is not None
    loaded = load(ModelConfig(str(DEMO_MODEL), max_model_len=2048), engine)
    sized = size_cache(loaded, engine, memory)
    Profile.of(engine, sized.block_size, sized.max_model_len).run(build_core(sized, engine))
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.set_per_process_memory_fraction(1.0)
    share = reserved / limit
    session.add("the KV cache and steps fill gpu_memory", 0.8 < share <= 1, share=share)


def _take_memory(session: Session) -> None:
    """Run a step while other memory of this process fills the device."""
    engine = Engine(build(SMALL, session.dtype, session.device), Load(4, 512, 8))
    torch.cuda.empty_cache()
    num_free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(num_free - FREE_BYTES, dtype=torch.uint8, device=session.device)
    outputs = []
    try:
        engine.add()
        while engine.core.has_work:
            outputs += engine.core.step()
        causes = [str(output.error.__cause__)[:80] for output in outputs if output.error]
        shortages = engine.core.stats().memory_shortages
        is_known = sum(shortages.values()) > 0
        what = "a prefill without memory is repeated in smaller steps"
        session.add(what, is_known, failed=len(causes), cause=causes[:1], **shortages)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:200]}"
        session.add("a prefill without memory: the step raises", error=message)
    del taken
    torch.cuda.empty_cache()
    session.add("with memory again, requests are served", engine.measure().decode > 0)


def _lose_context(session: Session) -> None:
    """Record the error of each kind of call after torch's check of an index ends the context."""
    device = session.device
    rows, weight = torch.ones(2, 64, device=device), torch.ones(64, device=device)
    rms_norm(rows, weight, 1e-6)
    calls: dict[str, Callable[[], object]] = {
        "index": lambda: rows[torch.tensor([9], device=device)],
        "synchronize": torch.cuda.synchronize,
        "allocate": lambda: torch.empty(1 << 26, device=device),
        "torch": lambda: rows.add_(1),
        "product": lambda: rows @ rows.T,
        "triton": lambda: rms_norm(rows, weight, 1e-6),
        "to_host": rows.tolist,
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
            raised[name] = "nothing"
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raised[name] = f"{type(error).__name__}: {message[:100]}"
    session.add("a lost context: errors of calls", **raised)
    sys.stdout.flush()
    os._exit(0)  # An orderly exit would raise an error as well.
