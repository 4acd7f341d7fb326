"""Bugs in the life of large payloads: who may read them, and when their memory is free again."""

from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, skip, wrap


@bug("engine", "images", "I7")
def payload_not_released() -> None:
    from shared.blobs.store import Blobs

    skip(Blobs, "release")


@bug("engine", "images", "I7")
def reader_pin_leaks() -> None:
    """A reader never reports to the owner that it has finished with a payload."""
    from shared.blobs.transports import SharedMemoryTransport

    skip(SharedMemoryTransport, "_finish_reading")


@bug("engine", "dying with unread payloads", "I1", "I10")
def lost_payload_fails_request() -> None:
    from shared.errors import WorkerFailure
    from shared.stage.stage import Stage

    async def give_up(self: Stage, *_: object) -> None:
        raise WorkerFailure("a payload is lost")

    replace_attribute(Stage, "rerender", give_up)


@bug("engine", "dying with unread payloads", "I7")
def dead_owner_stays_mapped() -> None:
    from shared.blobs.store import Blobs

    skip(Blobs, "_sweep")


@bug("renderer", "frozen renderers", "I7")
def outputs_not_discarded() -> None:
    from shared.stage.stage import Stage

    skip(Stage, "discard_outputs")


@bug("renderer", "small arena", "I3", "I10")
def pinned_slot_is_reused() -> None:
    from shared.blobs.slot_allocator import SlotPool

    skip(SlotPool, "_pin")


@bug("renderer", "small arena", "I10")
def full_arena_is_an_error() -> None:
    from collections.abc import Mapping

    from shared.blobs import mm_items
    from shared.blobs.store import Blobs
    from shared.codec.envelope import TensorData
    from shared.errors import MediaTooLarge

    @wrap(mm_items, "put_item")
    def or_fail(
        put: Any,
        blobs: Blobs,
        mm_hash: str,
        num_tokens: int,
        fields: Mapping[str, TensorData],
        ttl_s: float,
    ) -> Any:
        if (ref := put(blobs, mm_hash, num_tokens, fields, ttl_s)) is None:
            raise MediaTooLarge("there is no room for this image")
        return ref
