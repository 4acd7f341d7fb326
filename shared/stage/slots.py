"""Slots: queues of a stage, chosen so that an engine finds the request's blocks in its cache. Pure.

Requests with the same beginning get the same slot. Each slot has an owner among the engines, which
serves it before other engines do, and so finds blocks and images in its caches.

The slot depends on the request alone, and not on the engines. A renderer that repeats a publish
must use the same subject, or the request would be queued twice. Requests of different tenants,
adapters or cache salts share no blocks, so these are parts of each key. There are few slots, so
such requests may still get the same slot.
"""

import math
import struct
from collections.abc import Collection

from shared.protocol.multimodal import HashPart, content_hash
from shared.protocol.task_messages import EngineBody, TaskBody, TaskHeader

BEGINNING_TOKENS = 64
"""Number of first tokens that decide on the slot. For a shorter prompt a cached beginning saves too
little. If the number grew with the prompt, a chat would move to other slots."""


def slot_of_task(header: TaskHeader, body: TaskBody, num_slots: int) -> int | None:
    """Return the slot of an engine's task, from 0 to `num_slots` - 1.

    None for a stage without slots, and for a prompt without a slot key. Engines take such tasks in
    turns.
    """
    if num_slots == 1 or not isinstance(body, EngineBody):
        return None
    key = slot_key(header, body)
    return None if key is None else int(key, 16) % num_slots


def slot_key(header: TaskHeader, body: EngineBody) -> str | None:
    """Return the hash that decides on a task's slot; None for a short prompt without images.

    It is the hash of the client's own key if there is one. Otherwise it is the hash of the first
    image, if images are at least half of the prompt or the prompt is short. In other cases it is
    the hash of the first BEGINNING_TOKENS tokens.
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
    # The byte order is fixed, because renderers of several machines must agree.
    beginning = struct.pack(f"<{BEGINNING_TOKENS}q", *token_ids[:BEGINNING_TOKENS])
    early = [item for item in items if item.placeholder.offset < BEGINNING_TOKENS]
    images: HashPart = [[item.mm_hash, item.placeholder.offset] for item in early]
    return content_hash(*scope, "beginning", beginning, images)


def owners_of(slots: Collection[int], engines: Collection[str]) -> dict[int, str]:
    """Return the owner of each slot.

    It is the engine with the highest hash of engine and slot (rendezvous hashing), among the
    engines with less than an equal share. So engines with the same list of engines agree, and most
    slots keep their owner when engines are added or removed.
    """
    share = math.ceil(len(slots) / max(1, len(engines)))
    owned = dict.fromkeys(engines, 0)
    owners = {}
    for slot in sorted(slots):
        free = (engine for engine in engines if owned[engine] < share)
        owners[slot] = owner = max(free, key=lambda engine: content_hash(engine, slot))
        owned[owner] += 1
    return owners
