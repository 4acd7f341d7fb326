"""Size of the KV cache: by settings, or the memory of a GPU that nothing else needs."""

from dataclasses import dataclass

from rich.filesize import decimal

from shared.config.schema import EngineConfig
from shared.errors import ConfigError

DEFAULT_MIB = 256
"""Size of the KV cache, unless it is configured or measured."""


def block_size_of(engine: EngineConfig) -> int:
    """Return the configured block size, by default 8 on a CPU and 16 on a GPU.

    The last block of a sequence is half empty on average. With 32 sequences, prompts of 64 to 256
    tokens and 64 output tokens, 3.9 % of the slots are unused with blocks of 16 and 1.8 % with
    blocks of 8. Blocks of 8 are not slower on a CPU; the GPU kernels load 16 tokens at a time.
    """
    return engine.block_size or (8 if engine.device == "cpu" else 16)


def measures_cache(engine: EngineConfig) -> bool:
    """Return whether the size of the KV cache follows from the measured memory of a GPU."""
    is_set = engine.num_blocks is not None or engine.kv_cache_mib is not None
    return engine.device == "cuda" and not is_set


def configured_bytes(engine: EngineConfig) -> int:
    return (engine.kv_cache_mib or DEFAULT_MIB) * 2**20


def count_blocks(
    engine: EngineConfig,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    taken_bytes: int = 0,
) -> int:
    """Return the number of blocks that fit into the cache, or the configured number.

    `taken_bytes` of the cache are for other keys and values. Raises ConfigError, with settings that
    would fit, if a sequence of `max_model_len` does not.
    """
    num_blocks = engine.num_blocks or (configured_bytes(engine) - taken_bytes) // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        key = "engine.num_blocks" if engine.num_blocks else "engine.kv_cache_mib"
        # Other keys and values have up to half of the cache.
        needed_bytes = needed * block_bytes * (2 if taken_bytes else 1)
        shorter = ""
        if num_blocks:
            shorter = f", or lower the model's max_model_len to {num_blocks * block_size} or less"
        raise ConfigError(
            f"{key}: the pool has {num_blocks} KV blocks, one sequence of max_model_len"
            f" {max_model_len} takes {needed}; set engine.kv_cache_mib to"
            f" {-(-needed_bytes // 2**20)} or more (or engine.num_blocks to {needed}){shorter}",
            field=key,
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a device in bytes, measured before there is a cache."""

    limit: int
    """Part of the device that the worker may use, by `gpu_memory`."""
    free: int
    """Free memory before the weights were loaded; other programs have the rest."""
    weights: int
    """Weights, and tensors that stay: states, slots, the cache of embeddings."""
    graphs: int
    """Memory of CUDA graphs."""
    step: int
    """Memory of the largest step while it runs."""

    @property
    def cache(self) -> int:
        """Memory for the KV cache; negative if all else does not fit."""
        return min(self.limit, self.free) - self.weights - self.graphs - self.step

    def __str__(self) -> str:
        # A plan before the start has no measured parts.
        measured = f", a step {decimal(self.step)}, CUDA graphs {decimal(self.graphs)}"
        return (
            f"KV cache {decimal(max(0, self.cache))} of {decimal(min(self.limit, self.free))}:"
            f" weights take {decimal(self.weights)}{measured if self.step else ''}"
        )


def plan_blocks(use: MemoryUse, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Return the number of KV blocks that fit into the rest of the memory.

    Raises ConfigError, with settings that would fit, if a sequence of `max_model_len` does not.
    """
    num_blocks = max(0, use.cache) // block_bytes
    num_needed = -(-max_model_len // block_size)
    if num_blocks >= num_needed:
        return num_blocks
    missing = num_needed * block_bytes - use.cache
    remedies = []
    if num_blocks:
        remedies.append(f"set the model's max_model_len to {num_blocks * block_size} or less")
    if use.limit + missing <= use.free:
        remedies.append(f"raise engine.gpu_memory to {-(-(use.limit + missing) // 2**20)} MiB")
    if use.step >= missing:
        remedies.append("lower engine.max_num_batched_tokens and engine.max_num_seqs")
    remedies.append("use a device with more memory")
    raise ConfigError(
        f"engine.gpu_memory: one sequence of max_model_len {max_model_len} needs"
        f" {decimal(num_needed * block_bytes)}. {use}. Either {', or '.join(remedies)}",
        field="engine.gpu_memory",
    )
