"""Slower steps of a worker, so that a test can kill the worker in the middle of its work."""

import functools
import time
from typing import Any


def slow_down(owner: type, method: str, pause_s: float) -> None:
    """Have a method of a class take at least `pause_s` in this process, a fork of one worker."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pause_s)
        return original(*args, **kwargs)

    setattr(owner, method, slowly)
