"""Landlock of Linux: a process gives up files, connections and signals to other processes.

Standard library alone.
"""

import ctypes
import os
import struct

SCOPES = 6
"""First version that can scope signals and abstract sockets."""

# They have the same numbers on all processors.
_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_ASK_VERSION = 1
# Versions that can deny a further operation on files: moving between folders, truncating, ioctl.
_FURTHER_OPERATIONS = (2, 3, 5)
_NUM_FIRST_OPERATIONS = 13
_NETWORK = 4
_BIND_AND_CONNECT = 0b11
_SOCKETS_AND_SIGNALS = 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def find_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, version)


def restrict() -> bool:
    """Deny this process everything that the kernel's Landlock can deny.

    Returns whether this was possible. The process needs `no_new_privs`.
    """
    version = find_version()
    num_operations = _NUM_FIRST_OPERATIONS + sum(version >= v for v in _FURTHER_OPERATIONS)
    # The kernel denies each operation of this set that no rule allows. There are no rules.
    handled = struct.pack(
        "=QQQ",
        (1 << num_operations) - 1,
        _BIND_AND_CONNECT if version >= _NETWORK else 0,
        _SOCKETS_AND_SIGNALS if version >= SCOPES else 0,
    )
    ruleset = _libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
