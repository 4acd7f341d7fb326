"""Keys of `pagemill top`, and the part of a frame that they select."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from workers.cli.top_frame import EngineRow, Frame, ModelRow

SortKey = Literal["out tok/s", "in tok/s", "req/s", "name"]
SORT_KEYS: tuple[SortKey, ...] = ("out tok/s", "in tok/s", "req/s", "name")


@dataclass(slots=True)
class Selection:
    """Order of the rows, the selected model, and whether only its rows are shown."""

    sort_key: SortKey = SORT_KEYS[0]
    model: str | None = None
    is_only: bool = False

    def press(self, key: str, frame: Frame) -> bool:
        """Change the selection by a key, and return whether the display continues."""
        names = [row.model for row in self.sort(frame).models]
        position = names.index(self.model) if self.model in names else -1
        match key:
            case "q":
                return False
            case "j" if names:
                self.model = names[min(position + 1, len(names) - 1)]
            case "k" if names:
                self.model = names[max(position - 1, 0)]
            case "s":
                order = SORT_KEYS.index(self.sort_key) + 1
                self.sort_key = SORT_KEYS[order % len(SORT_KEYS)]
            case "\n" | "\r":
                self.is_only = not self.is_only and self.model is not None
        return True

    def sort(self, frame: Frame) -> Frame:
        """Return a frame with its models and engines in the order of the key."""
        return replace(
            frame,
            models=sorted(frame.models, key=self._order),
            engines=sorted(frame.engines, key=self._order),
        )

    def apply(self, frame: Frame) -> Frame:
        """Return the rows of a frame that are shown, in their order."""
        frame = self.sort(frame)
        if not self.is_only:
            return frame
        return replace(
            frame,
            models=[row for row in frame.models if row.model == self.model],
            engines=[row for row in frame.engines if row.model == self.model],
            queues=[row for row in frame.queues if row.model == self.model],
            pools=[row for row in frame.pools if self.model in row.models],
            starting=[row for row in frame.starting if row.model == self.model],
        )

    def _order(self, row: ModelRow | EngineRow) -> tuple[float, str]:
        rates = {
            "out tok/s": row.flow.generation_tokens_per_s,
            "in tok/s": row.flow.prompt_tokens_per_s,
            "req/s": row.flow.requests_per_s,
        }
        name = row.model if isinstance(row, ModelRow) else row.worker
        return -(rates.get(self.sort_key) or 0.0), name


@contextlib.contextmanager
def keys_read(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with each key that is typed at the terminal, without an echo."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def read() -> None:
        for key in os.read(fd, 64).decode(errors="replace"):
            press(key)

    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
