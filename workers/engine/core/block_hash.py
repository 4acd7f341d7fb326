"""What a full KV block is called: a hash of everything that its keys and values depend on.

A block's hash covers the hash of the block before it, and so all tokens from the beginning on, and
with them the block's place. Pictures are covered by their content and by where they lie: all of
them are filled with the same placeholder token. Sampling parameters have no part in it.

The chain begins with the tenant, so that nobody finds what another tenant has computed, and cannot
even learn from how soon an answer comes that there was something to find; and with the adapter,
which makes other keys and values of the same tokens. Hashes are SHA-256 in full: whoever found two
prompts with the same one could read answers to the other.
"""

import struct

from shared.protocol.multimodal import content_hash
from workers.engine.core.sequence import EngineRequest, Sequence


def block_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> list[str]:
    """Of its first `num_blocks` blocks, all of which must be full of known tokens.

    The sequence keeps them: its tokens do not change, there are only more of them.
    """
    hashes = sequence.block_hashes
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else _root(sequence.request)
        hashes.append(_block_hash(parent, sequence, index * block_size, block_size))
    return hashes[:num_blocks]


def extra_keys(
    sequence: Sequence, index: int, block_size: int
) -> tuple[str | tuple[str, int], ...] | None:
    """What the hash of block `index` covers beside its parent and its tokens, as it is told to
    others: the adapter, pictures with their place in the block, and first of all the tenant."""
    request, start = sequence.request, index * block_size
    keys: list[str | tuple[str, int]] = [] if request.adapter is None else [request.adapter]
    for i in request.items_within(start, start + block_size):
        item = request.items[i]
        keys.append((item.mm_hash, item.placeholder.offset - start))
    if index == 0 and request.tenant:
        keys.append(request.tenant)
    return tuple(keys) or None


def _root(request: EngineRequest) -> str:
    # No adapter has an empty name.
    return content_hash(request.tenant, request.adapter or "")


def _block_hash(parent: str, sequence: Sequence, start: int, block_size: int) -> str:
    token_ids = sequence.token_ids[start : start + block_size]
    assert len(token_ids) == block_size, "the block is not full"
    request = sequence.request
    items = [request.items[i] for i in request.items_within(start, start + block_size)]
    return content_hash(
        parent,
        # Whatever the machine's own byte order, for hashes may be compared between machines.
        struct.pack(f"<{block_size}q", *token_ids),
        [
            [item.mm_hash, item.placeholder.offset - start, item.placeholder.is_embed or b""]
            for item in items
        ],
    )
