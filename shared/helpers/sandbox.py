"""Sandbox of a process that reads a stranger's bytes. Standard library alone.

A fork server calls `isolate` once, and each of its children calls `confine`. Afterwards the child
can only compute within its limits, and use the descriptors that it has. Each layer stands alone,
because a kernel may lack some of them, see `missing`.
"""

import contextlib
import ctypes
import os
import resource
import tempfile

from shared.helpers import landlock, syscall_filter

NOBODY = 65534
# A process that does not end by SIGXCPU is killed a second later.
GRACE_S = 1

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWIPC = 0x08000000
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> None:
    """Disconnect this process and its children from files and the network, and drop all rights.

    All modules must be imported before. Children can only use the descriptors that they have.
    """
    is_root = os.geteuid() == 0
    folder = _open_removed_folder()
    # Other users may do this only in a user namespace, if the machine allows these.
    user = 0 if is_root else _CLONE_NEWUSER
    _libc.unshare(user | _CLONE_NEWNET | _CLONE_NEWIPC)
    if folder is not None:
        os.fchdir(folder)
        os.close(folder)
        with contextlib.suppress(OSError):
            os.chroot(".")
    for number in range(_MAX_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    if is_root:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
    # In its user namespace the process of another user has all capabilities.
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def confine(max_cpu_s: int, max_memory_bytes: int, niceness: int) -> None:
    """Limit this process, and refuse everything but computing and its open descriptors."""
    os.nice(niceness)
    # Other processes of this user cannot read its memory.
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    landlock.restrict()
    for kind, soft, hard in (
        # The soft limit ends the process by SIGXCPU. SIGKILL would look like a kill from outside.
        (resource.RLIMIT_CPU, max_cpu_s, max_cpu_s + GRACE_S),
        (resource.RLIMIT_AS, max_memory_bytes, max_memory_bytes),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))
    syscall_filter.install()


def missing() -> list[str]:
    """Return the names of the layers that this machine does not have."""
    version = landlock.find_version()
    names = []
    if version == 0:
        names.append("Landlock")
    elif version < landlock.SCOPES:
        names.append("scopes of Landlock")
    if not syscall_filter.is_available():
        names.append("seccomp")
    return names


def _open_removed_folder() -> int | None:
    """Return a descriptor of an empty folder. It has no name, so it stays empty."""
    try:
        path = tempfile.mkdtemp(prefix="pagemill-")
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.rmdir(path)
    except OSError:
        return None
