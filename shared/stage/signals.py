"""Signals of a worker process. It imports little, so that a worker sets handlers first of all."""

import os
import signal
from collections.abc import Callable

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_at_once() -> None:
    """Make signals end this process at once with exit code 0, because it has no work yet.

    Without handlers the first process of a container ignores signals, and is killed in the end.
    """
    set_handlers(exit_now, exit_now)


def set_handlers(on_stop: Callable[[], object], on_hangup: Callable[[], object]) -> None:
    """Call `on_stop` on SIGTERM and SIGINT, and `on_hangup` on SIGHUP, in the main thread.

    Under nohup SIGHUP stays ignored. The handlers of an event loop are not used, because the loop
    restores the default action when it closes, and a late signal would kill a worker that has
    drained.
    """
    for number, handler in zip(_NUMBERS, (on_stop, on_stop, on_hangup), strict=True):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, act=handler: act())


def ignore() -> None:
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def exit_now() -> None:
    # A thread that loads a model would keep a usual exit waiting.
    os._exit(0)
