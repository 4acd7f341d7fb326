"""Sandbox of a decoder process: it may only compute, within limits, and answer on its socket.

Most of these mechanisms exist only on Linux. A mechanism that the kernel does not allow is skipped,
because the limits on time and memory do not depend on it.
"""

import contextlib
import ctypes
import os
import resource

from workers.renderer.decoding.messages import DecodingLimits

NOBODY = 65534
# A decoder that does not end by SIGXCPU is killed a second later.
GRACE_S = 1
NICENESS = 10

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWIPC = 0x08000000

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> None:
    """Disconnect this process and its children from the network, and drop root's privileges."""
    is_root = os.geteuid() == 0
    # Other users may do this only in a user namespace, if the machine allows these.
    user = 0 if is_root else _CLONE_NEWUSER
    _libc.unshare(user | _CLONE_NEWNET | _CLONE_NEWIPC)
    if is_root:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def confine(limits: DecodingLimits) -> None:
    """Limit this process, and keep it from opening files."""
    # The renderer's other requests have priority.
    os.nice(NICENESS)
    # Other processes of this user cannot read its memory.
    _libc.prctl(_PR_SET_DUMPABLE, 0)
    memory = limits.max_memory_mib * 2**20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limits.max_cpu_s, limits.max_cpu_s + GRACE_S),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))
