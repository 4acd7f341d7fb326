"""Slots: the queue of a model's engines that a request waits in, from what engines may have cached.

Requests with the same beginning get the same slot, and each slot has an owner among the engines,
which serves it before others do and so finds blocks and images in its caches.

The slot depends on the request alone. A renderer that repeats its hand-over must publish the same
subject, or the request would be queued twice; so the engine that serves a slot is no part of it.
Requests of different tenants, adapters or cache salts can share no blocks, and these begin each
key. Slots are few, so such requests may still meet in one. Pure.
"""

import struct
from collections.abc import Collection, Sequence

from msgspec import Struct

from shared.protocol.multimodal import HashPart, MultiModalKwargsItem, content_hash
from shared.protocol.task_messages import EngineBody, TaskBody, TaskHeader

BLOCK_TOKENS = 16
"""Unit of the beginnings that decide on slots. Engines may have other blocks, and renderers, which
choose the slots, do not know them."""
MIN_BLOCKS = 4
"""A shorter beginning is not worth a choice of engine."""


class SlotRequest(Struct, frozen=True):
    """The fields of a request that decide on its slot."""

    request_id: str
    tenant: str
    token_ids: Sequence[int]
    items: Sequence[MultiModalKwargsItem] = ()
    """Images in the order of their placeholders."""
    adapter: str = ""
    cache_salt: str = ""
    conversation: str = ""
    """The client's own name of the conversation, if it has one."""


def slot_of_task(header: TaskHeader, body: TaskBody, num_slots: int) -> int | None:
    """Return the slot of an engine's task.

    None for a stage without slots, and for a prompt too short to be worth a choice of engine: such
    tasks are served in turns.
    """
    if num_slots == 1 or header.ticket is None or not isinstance(body, EngineBody):
        return None
    request = SlotRequest(
        header.request_id,
        header.ticket.tenant,
        body.prompt_token_ids,
        body.items,
        header.adapter or "",
        header.ticket.cache_salt,
    )
    if not (request.items or beginning_blocks(len(request.token_ids) // BLOCK_TOKENS)):
        return None
    return slot_of(request, num_slots, BLOCK_TOKENS)


def slot_of(request: SlotRequest, num_slots: int, block_size: int) -> int:
    """Return the slot of a request, from 0 to `num_slots` - 1."""
    return int(slot_key(request, block_size), 16) % num_slots


def owned_slots(engine: str, engines: Collection[str], slots: Collection[int]) -> set[int]:
    """Return the slots that `engine`, one of `engines`, owns.

    The owner is the engine with the highest hash of both (rendezvous hashing). So all engines that
    know the same others agree, and one that comes or goes moves no slot between the rest.
    """
    return {slot for slot in slots if engine == max(engines, key=lambda e: content_hash(e, slot))}


def slot_key(request: SlotRequest, block_size: int) -> str:
    """Return the hash of the first of these that the request has.

    The name of its conversation; its first image, if images are half of the prompt or more; its
    beginning of `beginning_blocks`; its id.
    """
    scope = (request.tenant, request.adapter, request.cache_salt)
    if request.conversation:
        return content_hash(*scope, "conversation", request.conversation)
    num_image_tokens = sum(item.placeholder.length for item in request.items)
    if request.items and 2 * num_image_tokens >= len(request.token_ids):
        return content_hash(*scope, "item", request.items[0].mm_hash)
    num_blocks = beginning_blocks(len(request.token_ids) // block_size)
    if num_blocks:
        return content_hash(*scope, "beginning", *_beginning(request, num_blocks * block_size))
    return content_hash(*scope, "request", request.request_id)


def beginning_blocks(num_blocks: int) -> int:
    """Return how many of a prompt's full blocks decide on its slot; 0 if it has too few.

    It is half of them, rounded down to a power of two: a prompt that grows by less than its own
    length finds the same number more often than not, and mostly common text in it.
    """
    if num_blocks < MIN_BLOCKS:
        return 0
    half = num_blocks // 2
    return max(MIN_BLOCKS, 1 << half.bit_length() - 1)


def _beginning(request: SlotRequest, num_tokens: int) -> tuple[HashPart, HashPart]:
    """Return the first tokens, and the images that begin within them."""
    items = [item for item in request.items if item.placeholder.offset < num_tokens]
    return (
        # Fixed byte order, because renderers of several machines must agree.
        struct.pack(f"<{num_tokens}q", *request.token_ids[:num_tokens]),
        [[item.mm_hash, item.placeholder.offset] for item in items],
    )
