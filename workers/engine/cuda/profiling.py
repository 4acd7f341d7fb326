"""Measurement of the memory that steps need, before the KV cache takes the rest of the device.

The largest steps run over a small cache. They compile the kernels that requests need later, so the
first requests do not wait for a compiler.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec.structs import replace

from shared.config.schema import EngineConfig
from shared.gpu.allocator import limit_memory
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.cuda.cache_plan import MemoryUse

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logprobs=5, min_tokens=1, logit_bias={0: 1.0}),
)
"""Kinds of sampling, each of which has separate kernels."""
NUM_TOKENS = 3
"""Tokens that each request generates."""


class DeviceMemory(Protocol):
    """Memory of the device of a process, in bytes."""

    def free(self) -> int: ...

    def allocated(self) -> int:
        """Return the size of the tensors and graphs of the process, and forget the last peak."""

    def peak(self) -> int:
        """Return the largest size since the last call of `allocated`."""


class CudaMemory:
    """The memory of the GPU that the process sees."""

    def free(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def allocated(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved()


@dataclass(frozen=True, slots=True)
class Profile:
    """Requests of the largest steps, and the cache over which they run."""

    num_seqs: int
    prompt_len: int
    num_blocks: int

    @classmethod
    def of(cls, engine: EngineConfig, block_size: int, max_model_len: int) -> "Profile":
        num_seqs = min(engine.max_num_seqs, engine.max_num_batched_tokens)
        longest = max(1, max_model_len - NUM_TOKENS)
        prompt_len = min(engine.max_num_batched_tokens // num_seqs, longest)
        return cls(num_seqs, prompt_len, num_seqs * -(-(prompt_len + NUM_TOKENS) // block_size))

    @property
    def max_model_len(self) -> int:
        return self.prompt_len + NUM_TOKENS

    def run(self, core: EngineCore) -> None:
        """Run a step with as many prompt tokens as there may be, steps with a prompt next to
        decodes, and steps of as many decodes as there may be, with all kinds of sampling."""
        for number in range(self.num_seqs):
            core.add(self._request(number))
        core.step()
        # Another prompt comes next to decodes, in the place of the first request.
        core.cancel(_name(0))
        core.add(self._request(self.num_seqs))
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise output.error

    def _request(self, number: int) -> EngineRequest:
        kind = KINDS[number % len(KINDS)]
        sampling = replace(kind, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
        # Tenants share no cached prefixes.
        prompt, tenant = [0] * self.prompt_len, f"tenant-{number}"
        return EngineRequest(_name(number), prompt, [], sampling, tenant=tenant)


def _name(number: int) -> str:
    return f"profile-{number}"


class ClaimedMemory:
    """Part of its device that a process may use, and the memory that was free before it."""

    def __init__(self, device: DeviceMemory, limit: int, cache_bytes: int = 0) -> None:
        """`cache_bytes` are for tensors that stay after a request, such as cached embeddings."""
        self.device = device
        self.limit = limit
        self.cache_bytes = cache_bytes
        self.free = device.free()

    @classmethod
    def claim(cls, engine: EngineConfig) -> "ClaimedMemory | None":
        """Limit this process to `gpu_memory`, before it loads weights. None without a GPU."""
        limit = limit_memory(engine)
        if limit is None:
            return None
        return cls(CudaMemory(), limit, engine.embedding_cache_mib * 2**20)


def measure_steps(
    memories: Sequence[ClaimedMemory], new_core: Callable[[], EngineCore], profile: Profile
) -> list[MemoryUse]:
    """Run the largest steps of a new core, and return what they took of the memory of each rank.

    The core and its graphs are dropped.
    """
    devices = [memory.device for memory in memories]
    weights = [device.allocated() for device in devices]
    core = new_core()
    # The small cache counts as part of the graphs, and is released with them.
    before = [device.allocated() for device in devices]
    profile.run(core)
    peaks = [device.peak() for device in devices]
    return [
        MemoryUse(memory.limit, memory.free, own + memory.cache_bytes, start - own, peak - start)
        for memory, own, start, peak in zip(memories, weights, before, peaks, strict=True)
    ]
