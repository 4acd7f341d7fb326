"""Core dumps of agents, which would hold the tokens of servers, are forbidden."""

import contextlib
import ctypes
import resource

PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """Let the kernel write no core of this process, and no other process of its user read it.

    A core pattern that pipes cores to a program ignores the limit, and heeds the second.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has this.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
