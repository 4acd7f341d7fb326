"""Named points at which a worker's process kills itself, by chance or at the k-th pass.

With `before_publish@3,mid_tokens:2=0.05` a worker dies at the third pass of the first point, and
with a chance of 5 % whenever it has written the second record of tokens of a log.
`renderer/before_publish@3` applies to renderers only.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

POINTS = (
    "before_publish",  # a stage is about to forward a task
    "after_publish_before_ack",  # the task is forwarded, and the input is not acknowledged
    "after_ack",
    "mid_read",  # an engine reads a payload
    "mid_tokens",  # `mid_tokens:k`: this worker has written its k-th record of tokens of a log
    "before_final",
    "after_final_before_ack",
)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A crash point with its chance, or with the number of the pass at which it triggers."""

    point: str
    chance: float
    at_pass: int

    def __post_init__(self) -> None:
        if self.point.partition(":")[0] not in POINTS:
            raise ValueError(f"no crash point {self.point!r}; there is: {', '.join(POINTS)}")


def parse_triggers(text: str, role: str) -> list[Trigger]:
    """Parse the triggers that apply to a worker of `role`."""
    found = []
    for part in filter(None, text.split(",")):
        only_role, _, rest = part.rpartition("/")
        if only_role in ("", role):
            found.append(_parse_trigger(rest))
    return found


def _parse_trigger(text: str) -> Trigger:
    point, by_pass, number = text.partition("@")
    if by_pass:
        return Trigger(point, 0.0, int(number))
    point, _, chance = text.partition("=")
    return Trigger(point, float(chance), 0)


class CrashPoints:
    """The crash points of one worker; call it at each point."""

    def __init__(self, triggers: list[Trigger], seed: str, report: Callable[[str], object]) -> None:
        """`report` is called with the name of the point before the process dies."""
        self._triggers = {trigger.point: trigger for trigger in triggers}
        self._rng = random.Random(seed)
        self._passes: Counter[str] = Counter()
        self._report = report

    def __call__(self, point: str) -> None:
        trigger = self._triggers.get(point)
        if trigger is None:
            return
        self._passes[point] += 1
        if self._passes[point] == trigger.at_pass or self._rng.random() < trigger.chance:
            self._report(point)
            os.kill(os.getpid(), signal.SIGKILL)
