"""Times operations on this machine, and stores the chosen options next to the compiled kernels.

One process at a time measures, for at most a quarter of a second at each start, until there are
enough rounds. Processes with the same processor, kernels, version of torch and number of threads
share a file.
"""

import contextlib
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import structlog
from msgspec import Struct

from shared.native import library
from shared.native.choices import (
    ENOUGH_ROUNDS,
    Implementation,
    KernelSetting,
    Measurement,
    Operation,
    Option,
    Times,
    fits,
    force,
    is_enough,
    update,
)

BUDGET_S = 0.25
"""Time for the measurements at a start, separately for the decoder and for the tower."""
PREFIX = "choices-"

Run: TypeAlias = Callable[[Implementation, int], object]
"""Computes an operation once, by an implementation and for a number of rows."""


class Trial(NamedTuple):
    """An operation that needs an option."""

    operation: Operation
    prepare: Callable[[], Run]
    """Allocates the inputs of runs; called only if the operation is measured."""


class MachineKey(Struct, frozen=True):
    """Properties of the machine and the process that affect times."""

    processor: str
    kernels: str
    """Name of the library, which changes with its sources, flags and compiler."""
    torch: str
    num_threads: int

    @property
    def file_name(self) -> str:
        return f"{PREFIX}{hashlib.sha256(msgspec.json.encode(self)).hexdigest()}.json"


class ChoiceRecord(Struct, frozen=True):
    """Content of a file: all operations that were measured under one key."""

    key: MachineKey
    measured: dict[str, Measurement] = {}


def select(
    trials: Sequence[Trial], setting: KernelSetting, key: MachineKey, budget_s: float = BUDGET_S
) -> dict[str, Option]:
    """Return the configured or measured option of each operation, by name."""
    # Layers of equal sizes have the same operations.
    trials = list({trial.operation.name: trial for trial in trials}.values())
    operations = {trial.operation.name: trial.operation for trial in trials}
    if setting != "measured":
        return {name: force(operation, setting) for name, operation in operations.items()}
    measured = _measure_missing(trials, key, budget_s)
    return {
        name: measured[name].option if name in measured else operation.options[0]
        for name, operation in operations.items()
    }


def read_records(folder: Path) -> list[ChoiceRecord]:
    """Return the records in a folder. Damaged files are ignored."""
    records = (_read(file) for file in sorted(folder.glob(f"{PREFIX}*.json")))
    return [record for record in records if record is not None]


def _measure_missing(
    trials: Sequence[Trial], key: MachineKey, budget_s: float
) -> dict[str, Measurement]:
    """Return the stored measurements, after measuring operations that need more rounds."""
    try:
        folder = library.cache_folder()
    except OSError as error:
        structlog.get_logger().warning("kernel_choices_not_kept", reason=str(error))
        return _measure(trials, {}, budget_s)
    file = folder / key.file_name
    stored = _stored(file, trials)
    if not _lacking(trials, stored):
        return stored
    with library.only_process(folder):
        # Another process may have measured meanwhile.
        stored = _stored(file, trials)
        measured = _measure(_lacking(trials, stored), stored, budget_s)
        with contextlib.suppress(OSError):  # If the disk is full, the next start measures again.
            before = _read(file)
            others = {} if before is None else before.measured
            _write(file, ChoiceRecord(key, {**others, **measured}))
    return {**stored, **measured}


def _lacking(trials: Sequence[Trial], stored: dict[str, Measurement]) -> list[Trial]:
    return [
        trial
        for trial in trials
        if not is_enough(trial.operation, stored.get(trial.operation.name))
    ]


def _stored(file: Path, trials: Sequence[Trial]) -> dict[str, Measurement]:
    record = _read(file)
    measured = {} if record is None else record.measured
    names = {
        trial.operation.name
        for trial in trials
        if fits(trial.operation, measured.get(trial.operation.name))
    }
    return {name: measured[name] for name in names}


def _measure(
    trials: Sequence[Trial], stored: dict[str, Measurement], budget_s: float
) -> dict[str, Measurement]:
    """Time operations one after the other until the budget is spent. The next start continues."""
    deadline = time.perf_counter() + budget_s
    measured = {}
    for operation, prepare in trials:
        if time.perf_counter() > deadline:
            break
        before = stored.get(operation.name)
        rounds = _time_rounds(operation, prepare(), deadline)
        if rounds:
            measured[operation.name] = update(operation, before, rounds)
            option = str(measured[operation.name].option)
            structlog.get_logger().info("kernel_chosen", operation=operation.name, option=option)
    return measured


def _time_rounds(operation: Operation, run: Run, deadline: float) -> list[Times]:
    """Run all implementations in turns, until there are enough rounds or the deadline has passed.

    The turns distribute slow phases of the machine over all implementations. An incomplete round is
    dropped.
    """
    turns = list(itertools.product(operation.rows, operation.implementations))
    rounds: list[Times] = []
    while len(rounds) < ENOUGH_ROUNDS:
        times: Times = {}
        for rows, implementation in turns:
            start = time.perf_counter()
            if start > deadline:
                return rounds
            run(implementation, rows)
            # A clock may be too coarse for the time of one product, which is never 0.
            seconds = max(time.perf_counter() - start, 1e-9)
            times.setdefault(implementation, {})[rows] = seconds
        rounds.append(times)
        # The first turn may have had cold caches. In the next round it is the last.
        turns.reverse()
    return rounds


def _read(file: Path) -> ChoiceRecord | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChoiceRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _write(file: Path, record: ChoiceRecord) -> None:
    """Replace the file at once, so that no reader finds a part of it."""
    with tempfile.TemporaryDirectory(prefix=library.BUILD_PREFIX, dir=file.parent) as build:
        written = Path(build) / file.name
        written.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        written.replace(file)
