"""Named points of a worker's road at which its process kills itself, by chance or at the k-th pass.

`before_publish@3,mid_tokens:2=0.05` dies at the third pass of the first point, and with a chance of
5 % whenever the second record of tokens of a log has been written. `renderer/before_publish@3` is
for renderers only.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

POINTS = (
    "before_publish",  # a stage is about to hand over
    "after_publish_before_ack",  # it has, and its input is not acknowledged
    "after_ack",
    "mid_read",  # an engine has a payload under its eyes
    "mid_tokens",  # `mid_tokens:k`: the k-th record of tokens of a log has been written by us
    "before_final",
    "after_final_before_ack",
)


@dataclass(frozen=True, slots=True)
class Trigger:
    point: str
    chance: float
    at_pass: int

    def __post_init__(self) -> None:
        if self.point.partition(":")[0] not in POINTS:
            raise ValueError(f"no crash point {self.point!r}; there is: {', '.join(POINTS)}")


def parse_triggers(text: str, role: str) -> list[Trigger]:
    """Those of a worker of `role`."""
    found = []
    for part in filter(None, text.split(",")):
        whose, _, rest = part.rpartition("/")
        if whose in ("", role):
            found.append(_parse_trigger(rest))
    return found


def _parse_trigger(text: str) -> Trigger:
    point, by_pass, number = text.partition("@")
    if by_pass:
        return Trigger(point, 0.0, int(number))
    point, _, chance = text.partition("=")
    return Trigger(point, float(chance), 0)


class CrashPoints:
    def __init__(self, triggers: list[Trigger], seed: str, tell: Callable[[str], object]) -> None:
        """`tell` is called with the point before the end."""
        self._triggers = {trigger.point: trigger for trigger in triggers}
        self._rng = random.Random(seed)
        self._passes: Counter[str] = Counter()
        self._tell = tell

    def __call__(self, point: str) -> None:
        trigger = self._triggers.get(point)
        if trigger is None:
            return
        self._passes[point] += 1
        if self._passes[point] == trigger.at_pass or self._rng.random() < trigger.chance:
            self._tell(point)
            os.kill(os.getpid(), signal.SIGKILL)
