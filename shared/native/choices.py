"""Choice of the implementation of an operation, by measured times on this machine. Pure.

Other work on the machine can only prolong a measurement. Therefore the least time of several rounds
counts, over all starts, and an option is only replaced by an option that is faster by a margin.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

Implementation: TypeAlias = Literal["vector", "tiles", "torch"]
"""AVX-512 and AMX tiles in the C++ kernels, and torch's products, which use oneDNN."""
KernelSetting: TypeAlias = Literal["measured", "vector", "tiles", "torch"]
"""`measured`, or the implementation that the configuration sets."""
Times: TypeAlias = dict[Implementation, dict[int, float]]
"""Least seconds of each implementation by number of rows."""

MARGIN = 1.1
"""Factor by which another option must be faster than the current option."""
MIN_ROUNDS = 3
"""Number of rounds before an option is chosen, because the first round includes one-time work."""
ENOUGH_ROUNDS = 6
"""Number of rounds after which an operation is no longer measured."""
NEVER = 2**31 - 1
"""Number of rows that no product has."""
DECODE_ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows for which a decoder's products are measured. Numbers in between count as the next
lower one."""


class Option(Struct, frozen=True):
    """An implementation of an operation, and the number of rows from which it is used."""

    implementation: Implementation
    min_rows: int = 1
    """Least number of rows. Fewer rows use vectors."""

    def at(self, rows: int) -> Implementation:
        return self.implementation if rows >= self.min_rows else "vector"

    @property
    def min_tile_rows(self) -> int:
        """Least number of rows that use tiles."""
        return self.min_rows if self.implementation == "tiles" else NEVER

    def __str__(self) -> str:
        limit = f" from {self.min_rows} rows" if self.min_rows > 1 else ""
        return self.implementation + limit


class Operation(Struct, frozen=True):
    """An operation of a model, such as the product of a layer."""

    name: str
    """Name with all sizes that affect the time, except the number of rows."""
    rows: tuple[int, ...]
    options: tuple[Option, ...]
    """Options of the operation. The first one is the default."""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        used = {option.at(rows) for option in self.options for rows in self.rows}
        order: tuple[Implementation, ...] = ("vector", "tiles", "torch")
        return tuple(name for name in order if name in used)


class Measurement(Struct, frozen=True):
    """Measured times of an operation, and the chosen option."""

    least_s: Times
    num_rounds: int
    option: Option


def decoder_product(
    num_inputs: int, num_outputs: int, has_tiles: bool, numbers: str = ""
) -> Operation:
    """Return a decoder's product with full weights, or with `numbers` such as `int8`.

    torch is no option, because it needs a second copy of weights.
    """
    name = " ".join(filter(None, ("product", numbers, f"{num_inputs} x {num_outputs}")))
    return _decoder_operation(name, has_tiles)


def decoder_attention(head_dim: int, has_tiles: bool) -> Operation:
    """Return a decoder's attention in a KV head; its rows are new tokens times query heads."""
    return _decoder_operation(f"attention {head_dim}", has_tiles)


def _decoder_operation(name: str, has_tiles: bool) -> Operation:
    limits = (8, *(rows for rows in DECODE_ROWS if rows != 8)) if has_tiles else ()
    options = (*(Option("tiles", rows) for rows in limits), Option("vector"))
    return Operation(f"decoder {name}", DECODE_ROWS, options)


def tower_operation(name: str, rows: Sequence[int], has_tiles: bool) -> Operation:
    """Return a product or the attention of a tower, which always have many rows."""
    tiles = (Option("tiles"),) if has_tiles else ()
    options = (*tiles, Option("vector"), Option("torch"))
    return Operation(f"tower {name}", tuple(rows), options)


def force(operation: Operation, setting: Implementation) -> Option:
    """Return the option with the configured implementation; vectors if there is no such option."""
    fitting = [option for option in operation.options if option.implementation == setting]
    return min(fitting or [Option("vector")], key=lambda option: option.min_rows)


def choose(operation: Operation, least_s: Times, current: Option) -> Option:
    """Return the option with the least excess, or the current option within the margin of it.

    The excess is the time of an option divided by the time of the fastest implementation, for the
    number of rows with the largest quotient.
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


def update(
    operation: Operation, stored: Measurement | None, rounds: Sequence[Times]
) -> Measurement:
    """Return the measurement with further rounds of all implementations and rows."""
    times = [stored.least_s] if stored is not None else []
    times += rounds
    num_rounds = len(rounds) + (0 if stored is None else stored.num_rounds)
    current = operation.options[0] if stored is None else stored.option
    least_s = _least(times)
    option = choose(operation, least_s, current) if num_rounds >= MIN_ROUNDS else current
    return Measurement(least_s, num_rounds, option)


def _least(times: Sequence[Mapping[Implementation, Mapping[int, float]]]) -> Times:
    least: Times = {}
    for measured in times:
        for implementation, by_rows in measured.items():
            into = least.setdefault(implementation, {})
            for rows, seconds in by_rows.items():
                into[rows] = min(seconds, into.get(rows, math.inf))
    return least


def is_enough(operation: Operation, stored: Measurement | None) -> bool:
    """Return whether an operation needs no further rounds. Other options' records do not count."""
    if len(operation.options) == 1:
        return True
    return fits(operation, stored) and stored is not None and stored.num_rounds >= ENOUGH_ROUNDS


def fits(operation: Operation, stored: Measurement | None) -> bool:
    """Return whether a measurement has this operation's options and rows, and possible times."""
    return (
        stored is not None
        and stored.option in operation.options
        and set(stored.least_s) == set(operation.implementations)
        and all(set(by_rows) == set(operation.rows) for by_rows in stored.least_s.values())
        and all(0 < s < math.inf for by_rows in stored.least_s.values() for s in by_rows.values())
    )
