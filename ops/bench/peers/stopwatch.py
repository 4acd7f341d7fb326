"""Times the phases of a step: wrapped methods are charged with their time beyond nested ones.

Each call reads the clock twice, which takes far less than a microsecond.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any


class Stopwatch:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._inner_s: list[float] = []
        """Time that nested calls have taken so far, for each call in progress."""
        self.total_s: dict[str, float] = {}

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Charge calls of `owner.name` to `phase`; the owner must look the name up at each call."""
        setattr(owner, name, self.timed(getattr(owner, name), phase))

    def timed(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(call)
        def charged(*args: Any, **kwargs: Any) -> Any:
            began_s = self._clock()
            self._inner_s.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took_s = self._clock() - began_s
                own_s = took_s - self._inner_s.pop()
                self.total_s[phase] = self.total_s.get(phase, 0.0) + own_s
                if self._inner_s:
                    self._inner_s[-1] += took_s

        return charged
