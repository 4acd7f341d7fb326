"""Statistics of an engine's steps and queues."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_waiting_batch: int
    """Waiting sequences of the batch lane."""
    num_without_input: int
    """Running sequences that wait for more of their text to speak."""
    num_free_blocks: int
    num_blocks: int
    prefix_query_tokens: int
    """Tokens looked up in the prefix cache. This and all following counts are since the start."""
    prefix_hit_tokens: int
    prefix_evictions: int
    """Cached blocks that were reused for other content."""
    num_preemptions: int
    memory_shortages: Mapping[str, int]
    """Reactions to steps for which the device had too little memory, see `memory_shortage`."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Draft tokens that became part of an output."""
    kv_waste: float
    """Fraction of the KV slots in held blocks that held no token, over all steps."""
    encoded_items: int
    mm_cache_queries: int
    mm_cache_hits: int
    num_steps: int
    num_batched_tokens: int
    """Tokens that went through the model in these steps."""
    prompt_tokens_per_s: float
    """Measured speed of whole steps of prompt tokens; 0 before the first step."""
    first_scheduled: tuple[str, ...]
    """Ids of requests whose first batch was the last step."""
