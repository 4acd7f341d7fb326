"""Slots: the queue of a model's engines that a request waits in, from what engines may have cached.

Requests with the same beginning get the same slot, and each slot has an owner among the engines,
which serves it before others do and so finds blocks and images in its caches.

The slot depends on the request alone. A renderer that repeats its hand-over must publish the same
subject, or the request would be queued twice; so the engine that serves a slot is no part of it.
Requests of different tenants, adapters or cache salts can share no blocks, and these begin each
key. Slots are few, so such requests may still meet in one. Pure.
"""

import math
import struct
from collections.abc import Collection

from shared.protocol.multimodal import HashPart, content_hash
from shared.protocol.task_messages import EngineBody, TaskBody, TaskHeader

BEGINNING_TOKENS = 64
"""Tokens of a beginning that decide on the slot. A shorter prompt is not worth a choice of engine;
with a number that grows with the prompt, a chat would move to other slots."""


def slot_of_task(header: TaskHeader, body: TaskBody, num_slots: int) -> int | None:
    """Return the slot of an engine's task, from 0 to `num_slots` - 1.

    None for a stage without slots, and for a prompt without a key that is too short to be worth a
    choice of engine: such tasks are served in turns.
    """
    if num_slots == 1 or not isinstance(body, EngineBody):
        return None
    key = slot_key(header, body)
    return None if key is None else int(key, 16) % num_slots


def slot_key(header: TaskHeader, body: EngineBody) -> str | None:
    """Return the hash of what decides on a task's slot; None if nothing does.

    It is the client's own key if there is one. Otherwise it is the first image, if images are half
    of the prompt or more or the prompt is short, and else the first BEGINNING_TOKENS tokens.
    """
    if header.ticket is None:
        return None
    scope = (header.ticket.tenant, header.adapter or "", header.ticket.cache_salt)
    if header.ticket.prompt_cache_key:
        return content_hash(*scope, "key", header.ticket.prompt_cache_key)
    token_ids, items = body.prompt_token_ids, body.items
    is_short = len(token_ids) < BEGINNING_TOKENS
    num_image_tokens = sum(item.placeholder.length for item in items)
    if items and (is_short or 2 * num_image_tokens >= len(token_ids)):
        return content_hash(*scope, "item", items[0].mm_hash)
    if is_short:
        return None
    # Fixed byte order, because renderers of several machines must agree.
    beginning = struct.pack(f"<{BEGINNING_TOKENS}q", *token_ids[:BEGINNING_TOKENS])
    early = [item for item in items if item.placeholder.offset < BEGINNING_TOKENS]
    images: HashPart = [[item.mm_hash, item.placeholder.offset] for item in early]
    return content_hash(*scope, "beginning", beginning, images)


def owners_of(slots: Collection[int], engines: Collection[str]) -> dict[int, str]:
    """Return the owner of each slot.

    It is the engine with the highest hash of both (rendezvous hashing) among those that own less
    than their share. So all engines that know the same others agree, shares are equal, and when
    engines come or go, most slots stay where they are.
    """
    share = math.ceil(len(slots) / max(1, len(engines)))
    owned = dict.fromkeys(engines, 0)
    owners = {}
    for slot in sorted(slots):
        free = (engine for engine in engines if owned[engine] < share)
        owners[slot] = owner = max(free, key=lambda engine: content_hash(engine, slot))
        owned[owner] += 1
    return owners
