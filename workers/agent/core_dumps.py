"""Prevention of core dumps, which would contain the access tokens of MCP servers."""

import contextlib
import ctypes
import resource

PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """Stop the kernel from dumping this process, and other processes of its user from reading it.

    A core pattern that pipes dumps to a program ignores the limit, and respects the flag.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):  # Only Linux has prctl.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
