"""Which implementation of an operation to use, by how long each takes on this machine. Pure.

A measurement is disturbed by other work on the machine, and only ever prolonged by it. So the least
time of several rounds counts, over all starts, and an option gives way only to one that is faster
by a margin.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

Implementation: TypeAlias = Literal["vector", "tiles", "torch"]
"""AVX-512 and the tiles of AMX in the C++ kernels, and torch's own products, which are oneDNN's."""
KernelSetting: TypeAlias = Literal["measured", "vector", "tiles", "torch"]
"""`measured`, or the implementation that the configuration demands."""
Times: TypeAlias = dict[Implementation, dict[int, float]]
"""Least seconds of each implementation by number of rows."""

MARGIN = 1.1
"""How many times as fast another option must be."""
MIN_ROUNDS = 3
"""With fewer rounds nothing is chosen: the first one includes one-time work."""
ENOUGH_ROUNDS = 6
"""More rounds are not measured."""
NEVER = 2**31 - 1
"""More rows than any product has."""
DECODE_ROWS = (1, 2, 4, 8, 16, 32)
"""A step's rows for which products are measured; between them, the next lower one counts."""


class Option(Struct, frozen=True):
    """A way to compute an operation: an implementation, and from how many rows on it is used."""

    implementation: Implementation
    min_rows: int = 1
    """With fewer rows, vectors are used."""

    def at(self, rows: int) -> Implementation:
        return self.implementation if rows >= self.min_rows else "vector"

    @property
    def min_tile_rows(self) -> int:
        """The least number of rows that tiles multiply."""
        return self.min_rows if self.implementation == "tiles" else NEVER

    def __str__(self) -> str:
        limit = f" from {self.min_rows} rows" if self.min_rows > 1 else ""
        return self.implementation + limit


class Operation(Struct, frozen=True):
    """An operation of a model, such as the product of a layer."""

    name: str
    """It has all sizes on which its time depends, but for the number of rows."""
    rows: tuple[int, ...]
    options: tuple[Option, ...]
    """The first one is used without a measurement."""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        used = {option.at(rows) for option in self.options for rows in self.rows}
        order: tuple[Implementation, ...] = ("vector", "tiles", "torch")
        return tuple(name for name in order if name in used)


class Measurement(Struct, frozen=True):
    """What is known of an operation, and the option that was chosen."""

    least_s: Times
    num_rounds: int
    option: Option


def decoder_product(num_inputs: int, num_outputs: int, has_tiles: bool) -> Operation:
    """A decoder's product. It has no option of torch, which needs the weights a second time."""
    return _decoder_operation(f"product {num_inputs} x {num_outputs}", has_tiles)


def decoder_attention(head_dim: int, has_tiles: bool) -> Operation:
    """A decoder's attention in a KV head; its rows are new tokens times query heads."""
    return _decoder_operation(f"attention {head_dim}", has_tiles)


def _decoder_operation(name: str, has_tiles: bool) -> Operation:
    limits = (8, *(rows for rows in DECODE_ROWS if rows != 8)) if has_tiles else ()
    options = (*(Option("tiles", rows) for rows in limits), Option("vector"))
    return Operation(f"decoder {name}", DECODE_ROWS, options)


def tower_operation(name: str, rows: Sequence[int], has_tiles: bool) -> Operation:
    """A product or the attention of a tower, whose rows are always many."""
    tiles = (Option("tiles"),) if has_tiles else ()
    options = (*tiles, Option("vector"), Option("torch"))
    return Operation(f"tower {name}", tuple(rows), options)


def force(operation: Operation, setting: Implementation) -> Option:
    """Return the option that a configuration demands; vectors if there is no such option."""
    fitting = [option for option in operation.options if option.implementation == setting]
    return min(fitting or [Option("vector")], key=lambda option: option.min_rows)


def choose(operation: Operation, least_s: Times, current: Option) -> Option:
    """Return the option with the least excess, or the current one unless that is the margin better.

    The excess is how many times as long an option takes as the fastest implementation, with the
    number of rows for which that is most.
    """
    excess = {option: _excess(operation, least_s, option) for option in operation.options}
    best = min(operation.options, key=excess.__getitem__)
    if current in excess and excess[current] <= MARGIN * excess[best]:
        return current
    return best


def _excess(operation: Operation, least_s: Times, option: Option) -> float:
    return max(
        least_s[option.at(rows)][rows] / min(by_rows[rows] for by_rows in least_s.values())
        for rows in operation.rows
    )


def update(operation: Operation, known: Measurement | None, rounds: Sequence[Times]) -> Measurement:
    """Return the measurement with further rounds of all implementations and rows."""
    times = [known.least_s] if known is not None else []
    times += rounds
    num_rounds = len(rounds) + (0 if known is None else known.num_rounds)
    current = operation.options[0] if known is None else known.option
    least_s = _least(times)
    option = choose(operation, least_s, current) if num_rounds >= MIN_ROUNDS else current
    return Measurement(least_s, num_rounds, option)


def _least(times: Sequence[Mapping[Implementation, Mapping[int, float]]]) -> Times:
    least: Times = {}
    for one in times:
        for implementation, by_rows in one.items():
            into = least.setdefault(implementation, {})
            for rows, seconds in by_rows.items():
                into[rows] = min(seconds, into.get(rows, math.inf))
    return least


def is_enough(operation: Operation, known: Measurement | None) -> bool:
    """Whether an operation needs no further rounds. A record of other options does not count."""
    if len(operation.options) == 1:
        return True
    return fits(operation, known) and known is not None and known.num_rounds >= ENOUGH_ROUNDS


def fits(operation: Operation, known: Measurement | None) -> bool:
    """Whether a measurement is of this operation's options and rows, and of possible times."""
    return (
        known is not None
        and known.option in operation.options
        and set(known.least_s) == set(operation.implementations)
        and all(set(by_rows) == set(operation.rows) for by_rows in known.least_s.values())
        and all(0 < s < math.inf for by_rows in known.least_s.values() for s in by_rows.values())
    )
