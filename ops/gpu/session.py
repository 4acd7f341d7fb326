"""One process of a section: its device, its share of the items, and its results."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shared.helpers.device_errors import is_device_lost
from workers.engine.cuda.kernels import tiling

T = TypeVar("T")

DRY_MULTIPROCESSORS = 4
"""Triton's interpreter runs programs one after the other."""
POISON_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
EXIT_LOST = 3
MARKS = {None: "", True: "ok", False: "WRONG"}


class Session:
    """A section that runs, on the CPU in a dry run. Results are appended to a file."""

    def __init__(
        self, section: str, folder: Path, *, dry: bool, share: tuple[int, int] = (0, 1)
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.section = section
        self.dry = dry
        self.share = share
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self._file = folder / "results.jsonl"
        if dry:
            tiling.NUM_MULTIPROCESSORS = DRY_MULTIPROCESSORS

    def add(self, what: str, ok: bool | None = None, /, **values: object) -> None:
        """Add a result: a check, or measured values if `ok` is None."""
        result = {"section": self.section, "what": what, "ok": ok, **values}
        with self._file.open("a") as file:
            file.write(json.dumps(result, default=str) + "\n")
        sys.stdout.write(f"{MARKS[ok]} {what} {values}\n")
        sys.stdout.flush()

    def attempt(self, what: str, call: Callable[[], object]) -> None:
        """Run one item. Its failure is a wrong result, and the next item runs.

        If the context of the device is lost, no item can run, and the process ends.
        """
        try:
            call()
            self.synchronize()
        except Exception as error:
            cause = error.__cause__ or error
            frames = traceback.extract_tb(cause.__traceback__)[-6:]
            at = [
                f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" for frame in frames
            ]
            self.add(what, False, error=f"{type(cause).__name__}: {str(cause)[:300]}", at=at)
            if is_device_lost(error):
                self.add(
                    "the context is lost, and the other items of this share are left out", False
                )
                os._exit(EXIT_LOST)

    def share_of(self, items: Iterable[T]) -> list[T]:
        """Return the items that this process runs."""
        index, number = self.share
        return list(items)[index::number]

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()

    def poison(self) -> None:
        """Leave NaN in the memory that is allocated next: an element that is not written is NaN."""
        if not self.dry:
            for num_bytes in POISON_BYTES:
                torch.full((num_bytes // 4,), float("nan"), device=self.device)

    def check_close(self, what: str, actual: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
        error = relative_error(actual, expected)
        self.add(what, error < limit, error=error)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
