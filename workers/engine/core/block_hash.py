"""Hashes of full KV blocks, over everything that the block's keys and values depend on.

A block's hash covers the hash of its parent block, as in vLLM: hence all tokens from the start of
the prompt, and the block's position. Images are covered by content hash and position, because all
image tokens have the same id. Sampling parameters do not matter.

The chain starts with the tenant and the adapter. A tenant cannot find the blocks of another tenant,
or detect them by response times; an adapter computes different keys and values from the same
tokens. Hashes are full SHA-256: a collision between two prompts would expose the outputs of one to
the sender of the other.
"""

import struct

from shared.protocol.multimodal import content_hash
from workers.engine.core.sequence import EngineRequest, Item, Sequence


def block_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> list[str]:
    """Return the hashes of the first `num_blocks` blocks, all of which must be full.

    The sequence stores them, because its tokens are only ever appended to.
    """
    request, hashes = sequence.request, sequence.block_hashes
    for index in range(len(hashes), num_blocks):
        # An adapter's name is never empty, so "" stands for no adapter.
        parent = hashes[-1] if hashes else content_hash(*_scope_of(request))
        hashes.append(_block_hash(parent, sequence, index * block_size, block_size))
    return hashes[:num_blocks]


def extra_keys(
    sequence: Sequence, index: int, block_size: int
) -> tuple[str | tuple[str, int], ...] | None:
    """Return the inputs of the hash of block `index` besides parent and tokens, for KV events.

    These are the adapter, the images as (mm_hash, position in the block) and, in the first block,
    the tenant.
    """
    request, start = sequence.request, index * block_size
    keys: list[str | tuple[str, int]] = [] if request.adapter is None else [request.adapter]
    for i in request.items_within(start, start + block_size):
        item = request.items[i]
        keys.append((item.mm_hash, item.placeholder.offset - start))
    if index == 0 and request.tenant:
        keys.append(request.tenant)
    return tuple(keys) or None


def _scope_of(request: EngineRequest) -> list[str]:
    """Return the properties that must be equal in requests that share blocks.

    A speech shares no blocks, because its tokens do not determine the rows of its input.
    """
    scope = [request.tenant, request.adapter or ""]
    return scope if request.speech is None else [*scope, request.request_id]


def _item_key(item: Item, start: int) -> list[str | int | bytes]:
    """Return the identity of an item in a block that begins at `start`.

    It includes the length, because a model may generate placeholder tokens right after an item.
    """
    place = item.placeholder
    return [item.mm_hash, place.offset - start, place.length, place.is_embed or b""]


def _block_hash(parent: str, sequence: Sequence, start: int, block_size: int) -> str:
    token_ids = sequence.token_ids[start : start + block_size]
    assert len(token_ids) == block_size, "the block is not full"
    request = sequence.request
    items = [request.items[i] for i in request.items_within(start, start + block_size)]
    return content_hash(
        parent,
        # Fixed byte order, because hashes may be compared between machines.
        struct.pack(f"<{block_size}q", *token_ids),
        [_item_key(item, start) for item in items],
    )
