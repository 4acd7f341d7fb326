"""KV cache events: changes of the blocks in the prefix cache, for routers of requests.

The payload has the format of vLLM's KV events, so vLLM's consumers can read it: msgpack, an array
`[ts, [event, …], data_parallel_rank]`, with events as maps that have a `type`. Hashes are sent as
vLLM does by default, as the last 64 bits of the full hash. That is enough for routing; the engine
itself never looks blocks up by them.
"""

from collections import deque

import msgspec
from msgspec import Struct

# Kind of memory that holds the blocks. vLLM reports this value on a CPU too.
MEDIUM = "GPU"
# Longer runs of blocks become several events, because message sizes are limited.
MAX_EVENT_TOKENS = 8192
MAX_BATCH_BYTES = 256 * 1024

ExtraKey = str | tuple[str, int]


class BlockStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks of one chain that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first of them; None at the start of a chain."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """Inputs of each block's hash besides parent and tokens; see `block_hash.extra_keys`."""


class BlockRemoved(Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that can no longer be found."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, frozen=True, tag=True):
    """No block can be found. This is the first event of an engine."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """Payload of one message."""

    ts: float
    """Unix time in seconds."""
    events: list[msgspec.Raw]
    data_parallel_rank: int = 0


class KVEvents:
    """Queue of unpublished events. One thread may add events while another takes them."""

    def __init__(self) -> None:
        self._events: deque[KVEvent] = deque([AllBlocksCleared()])

    def add_stored(
        self,
        block_hashes: list[str],
        parent: str | None,
        token_ids: list[int],
        extra_keys: list[tuple[ExtraKey, ...] | None],
        lora_name: str | None,
    ) -> None:
        """Add events for consecutive blocks of a chain, which hold `token_ids`."""
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

    def add_removed(self, block_hash: str) -> None:
        self._events.append(BlockRemoved([event_hash(block_hash)], MEDIUM))

    def take(self) -> list[KVEvent]:
        """Remove and return all events, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]


def event_hash(block_hash: str) -> int:
    """Return the last 64 bits of a hexadecimal hash."""
    return int(block_hash[-16:], 16)


def encode_batches(events: list[KVEvent], ts: float) -> list[bytes]:
    """Encode events as payloads of at most `MAX_BATCH_BYTES`, unless one event is larger."""
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
