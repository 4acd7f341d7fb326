"""Signals of a worker process. It imports little, so that handlers are set early in the start."""

import os
import signal
from collections.abc import Callable

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_at_once() -> None:
    """Let signals end this process at once with exit code 0, because it has no work yet.

    The first process of a container ignores signals without a handler, and would be killed.
    """
    set_handlers(exit_now, exit_now)


def set_handlers(
    on_stop: Callable[[], object],
    on_hangup: Callable[[], object],
    on_reload: Callable[[], object] = lambda: None,
) -> None:
    """Call `on_stop` on SIGTERM and SIGINT, and one of the others on SIGHUP, in the main thread.

    SIGHUP calls `on_hangup` in a process with a terminal, because the terminal has closed. In other
    processes a service manager sends it to reload the configuration, and it calls `on_reload`.
    Under nohup SIGHUP stays ignored. The handlers of an event loop are not used, because the loop
    restores the default action when it closes, and a late signal would kill a drained worker.
    """
    handlers = (on_stop, on_stop, on_hangup if has_terminal() else on_reload)
    for number, handler in zip(_NUMBERS, handlers, strict=True):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, act=handler: act())


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, or reads from or writes to one."""
    if any(map(os.isatty, (0, 1, 2))):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ignore() -> None:
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def exit_now() -> None:
    # An ordinary exit would wait for a thread that loads a model.
    os._exit(0)
