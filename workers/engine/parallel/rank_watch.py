"""Watch over the processes of other ranks while rank 0 waits for them."""

import select
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

from shared.errors import ConfigError
from shared.helpers.process_usage import Usage, usage_of
from shared.vision.rank_plan import FIELD
from workers.engine.parallel import messages

# Interval of looks at the processes.
LOOK_S = 1.0


class RankWatch:
    """Gives up ranks that hang. A rank that computes, compiles or reads from a disk does not."""

    def __init__(self, pids: Mapping[int, int], idle_s: float) -> None:
        """`pids` has the process of each rank."""
        self._pids = pids
        self._idle_s = idle_s

    def wait(self, has_ended: Callable[[float], bool]) -> None:
        """Wait until `has_ended`, which takes the seconds for which it may wait, returns true.

        Raises ConfigError if no process has used a processor or a disk for `idle_s`: ranks may wait
        for each other, so a single idle one does not hang.
        """
        usages, changed_s = list[Usage](), time.monotonic()
        while not has_ended(LOOK_S):
            now, now_s = [usage_of(pid) for pid in self._pids.values()], time.monotonic()
            if now != usages:
                usages, changed_s = now, now_s
            if now_s - changed_s >= self._idle_s:
                raise self._failed()

    def receive(self, answers: BinaryIO) -> bytes | None:
        """Return the next message; None if the writer has ended. Raises ConfigError as `wait`."""
        self.wait(lambda limit_s: bool(select.select([answers], [], [], limit_s)[0]))
        return messages.receive(answers)

    def _failed(self) -> ConfigError:
        ranks = ", ".join(map(str, self._pids))
        subject = f"rank {ranks} has" if len(self._pids) == 1 else f"ranks {ranks} have"
        return ConfigError(
            f"{FIELD}: {subject} not computed for {self._idle_s:g} s (engine.step_timeout_s) while"
            " rank 0 waited",
            field=FIELD,
        )
