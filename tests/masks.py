"""Masks of placeholder ranges in which some tokens are text."""

from collections.abc import Sequence


def pack_mask(is_embed: Sequence[bool]) -> bytes:
    """Return the value of `PlaceholderRange.is_embed`."""
    bits = sum(1 << i for i, embeds in enumerate(is_embed) if embeds)
    return bits.to_bytes(-(-len(is_embed) // 8), "little")
