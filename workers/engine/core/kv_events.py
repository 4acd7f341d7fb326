"""What becomes of blocks that can be found, told to whoever routes requests to engines.

The payload is that of vLLM's KV events, so that what reads those reads ours: msgpack, an array
`[ts, [event, …], data_parallel_rank]`, with events as maps that have their `type`. Hashes are sent
as vLLM does by default, as the last 64 bits of the whole: enough to route by, and nothing is looked
up by them here.
"""

from collections import deque

import msgspec
from msgspec import Struct

# The memory that the model computes in; vLLM says so on a CPU too.
MEDIUM = "GPU"
# An event of more would be told as several: a message has its limit.
MAX_EVENT_TOKENS = 8192
MAX_BATCH_BYTES = 256 * 1024

ExtraKey = str | tuple[str, int]


class BlockStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks of one chain that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the block before the first of them; None at the beginning of a chain."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """What a block's hash covers beside its parent and its tokens, for each block: the adapter,
    pictures as (mm_hash, place in the block), and in the first block the tenant."""


class BlockRemoved(Struct, frozen=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, frozen=True, tag=True):
    """Nothing can be found: what an engine tells first."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    ts: float
    """Unix seconds."""
    events: list[msgspec.Raw]
    data_parallel_rank: int = 0


class KVEvents:
    """Events that nobody has been told yet: one thread adds, another may take."""

    def __init__(self) -> None:
        self._events: deque[KVEvent] = deque([AllBlocksCleared()])

    def stored(
        self,
        block_hashes: list[str],
        parent: str | None,
        token_ids: list[int],
        extra_keys: list[tuple[ExtraKey, ...] | None],
        lora_name: str | None,
    ) -> None:
        """Consecutive blocks of a chain, and what is in them."""
        block_size = len(token_ids) // len(block_hashes)
        num_blocks = max(1, MAX_EVENT_TOKENS // block_size)
        for first in range(0, len(block_hashes), num_blocks):
            part = slice(first, first + num_blocks)
            self._events.append(
                BlockStored(
                    block_hashes=[event_hash(block_hash) for block_hash in block_hashes[part]],
                    parent_block_hash=None if parent is None else event_hash(parent),
                    token_ids=token_ids[part.start * block_size : part.stop * block_size],
                    block_size=block_size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=lora_name,
                    extra_keys=extra_keys[part],
                )
            )
            parent = block_hashes[part][-1]

    def removed(self, block_hash: str) -> None:
        self._events.append(BlockRemoved([event_hash(block_hash)], MEDIUM))

    def take(self) -> list[KVEvent]:
        """All so far, oldest first; they are given once."""
        return [self._events.popleft() for _ in range(len(self._events))]


def event_hash(block_hash: str) -> int:
    """Of a hash in hexadecimal."""
    return int(block_hash[-16:], 16)


def encode_batches(events: list[KVEvent], ts: float) -> list[bytes]:
    """In as few payloads as their size allows."""
    batches: list[list[msgspec.Raw]] = []
    num_bytes = MAX_BATCH_BYTES
    for event in events:
        encoded = msgspec.msgpack.encode(event)
        num_bytes += len(encoded)
        if num_bytes > MAX_BATCH_BYTES:
            batches.append([])
            num_bytes = len(encoded)
        batches[-1].append(msgspec.Raw(encoded))
    return [msgspec.msgpack.encode(EventBatch(ts, batch)) for batch in batches]
