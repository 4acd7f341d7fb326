"""Size of the KV cache on a GPU: the memory that nothing else needs. Pure."""

from dataclasses import dataclass

from rich.filesize import decimal

from shared.errors import ConfigError


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
        return (
            f"KV cache {decimal(max(0, self.cache))} of {decimal(min(self.limit, self.free))}:"
            f" weights take {decimal(self.weights)}, a step {decimal(self.step)}, CUDA graphs"
            f" {decimal(self.graphs)}"
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
