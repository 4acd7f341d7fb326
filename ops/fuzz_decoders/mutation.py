"""Mutations of the values of a message: msgspec's decoders are C, whose branches no fuzzer sees."""

import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.codec.envelope import ALIGNMENT

_PREFIX = struct.Struct("<4sHHII")
VALUES: Sequence[Any] = (
    None, True, 0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308,
    "", "a", ".", "*", "\0", "é", "\N{GRINNING FACE}", "0" * 64, "media:" + "f" * 64, "data:,",
    [], {}, [[]], {"": {}}, {"a": 1}, ["a"], [1, 2],
)  # fmt: skip


def mutate_value(data: bytes, form: str, seed: int) -> bytes | None:
    """Return the message with one value changed; None for bytes that are no such message."""
    codec: Any = msgspec.json if form == "json" else msgspec.msgpack
    chance = random.Random(seed)
    try:
        root = [codec.decode(data)]
        places = _places(root)
        holder, key = chance.choice(places)
        _change(holder, key, places, chance)
        encoded: bytes = codec.encode(root[0] if root else None)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
        return None
    return encoded


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Return every value as the container that has it, and its key."""
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                pending.append(holder[key])
    return places


def _change(
    holder: Any, key: Any, places: Sequence[tuple[Any, Any]], chance: random.Random
) -> None:
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1:
            source, name = chance.choice(places)
            # A copy, because no message has a cycle.
            holder[key] = msgspec.msgpack.decode(msgspec.msgpack.encode(source[name]))
        case 2 if isinstance(holder, dict):
            holder[chance.choice(("", "a", "type", "version", "é"))] = holder.pop(key)
        case 3 if isinstance(holder, list):
            holder.extend([holder[key]] * chance.choice((1, 2, 70, 300)))
        case _:
            holder[key] = chance.choice(VALUES)


def mutate_header(data: bytes, seed: int) -> bytes | None:
    """Return an envelope with one value of its header changed; None for bytes that are none."""
    if len(data) < _PREFIX.size:
        return None
    magic, version, flags, header_len, body_offset = _PREFIX.unpack_from(data)
    header = mutate_value(data[_PREFIX.size : _PREFIX.size + header_len], "msgpack", seed)
    if header is None:
        return None
    end = _PREFIX.size + len(header)
    padding = bytes(-end % ALIGNMENT)
    prefix = _PREFIX.pack(magic, version, flags, len(header), end + len(padding))
    return prefix + header + padding + data[body_offset:]
