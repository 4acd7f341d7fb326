"""Named points at which a worker's process kills itself by chance.

With `mid_tokens:2=0.05` a worker dies with a chance of 5 % whenever it has written the second
record of tokens of a log. `renderer/before_publish=0.1` applies to renderers only.
"""

import os
import random
import signal
from collections.abc import Callable

POINTS = (
    "before_publish",  # a stage is about to forward a task
    "after_publish_before_ack",  # the task is forwarded, and the input is not acknowledged
    "after_ack",
    "mid_read",  # an engine reads a payload
    "mid_tokens",  # `mid_tokens:k`: this worker has written its k-th record of tokens of a log
    "before_final",
    "after_final_before_ack",
)


def parse_chances(text: str, role: str) -> dict[str, float]:
    """Return the chances of the points that apply to a worker of `role`."""
    chances = {}
    for part in filter(None, text.split(",")):
        only_role, _, rest = part.rpartition("/")
        point, _, chance = rest.partition("=")
        if point.partition(":")[0] not in POINTS:
            raise ValueError(f"no crash point {point!r}; there is: {', '.join(POINTS)}")
        if only_role in ("", role):
            chances[point] = float(chance)
    return chances


class CrashPoints:
    """The crash points of one worker; call it at each point."""

    def __init__(
        self, chances: dict[str, float], seed: str, report: Callable[[str], object]
    ) -> None:
        """`report` is called with the name of the point before the process dies."""
        self._chances = chances
        self._rng = random.Random(seed)
        self._report = report

    def __call__(self, point: str) -> None:
        if point in self._chances and self._rng.random() < self._chances[point]:
            self._report(point)
            os.kill(os.getpid(), signal.SIGKILL)
