"""Decoders that do what hostile code would do: files name an operation instead of being decoded.

Run as a program, it tries all operations in decoders, and prints the outcomes as JSON.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.bus.embedded_server import find_binary
from shared.decoding.refusal import Refusal
from shared.errors import RequestError
from shared.helpers.sandbox import NOBODY
from tests.renderer.decoding.reading import LIMITS, Reader
from workers.renderer.decoding import formats, spawner
from workers.renderer.decoding.containers import Bytes
from workers.renderer.decoding.messages import DecodingLimits
from workers.renderer.decoding.pool import DecoderPool
from workers.renderer.decoding.video_file import VideoFile

CONTENT = "content"
REFUSED = f"errno {errno.EPERM}"
_ON_X86 = platform.machine() == "x86_64"
_libc = ctypes.CDLL(None, use_errno=True)


class Target(NamedTuple):
    """Files and a process of the decoder's user."""

    file: str
    folder: str
    pid: int
    """A process of this user."""
    program: str
    """A program that needs no libraries."""


def call(name: str, *arguments: object) -> object:
    """Call a function of the C library. Raises OSError."""
    return _checked(vars(_libc).get(name) or getattr(_libc, name), *arguments)


def syscall(on_x86: int, on_arm: int, *arguments: object) -> object:
    """Make a system call by its number. Raises OSError."""
    return _checked(_libc.syscall, on_x86 if _ON_X86 else on_arm, *arguments)


def _checked(function: Callable[..., int], *arguments: object) -> int:
    if (result := function(*arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def of_some_socket(name: str, address: bytes) -> object:
    """Call a function with the socket of the decoder, which has one of the first descriptors."""
    last = OSError(errno.EBADF, "there is no socket")
    for descriptor in range(3, 16):
        try:
            return call(name, descriptor, address, len(address))
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                last = error
    raise last


def exec_from_memory() -> object:
    descriptor = os.memfd_create("program")
    os.write(descriptor, b"#!/bin/sh\n")
    return call("fexecve", descriptor, (ctypes.c_char_p * 1)(), (ctypes.c_char_p * 1)())


UNIX = struct.pack("=H", socket.AF_UNIX) + b"\0pagemill-test"
INET = struct.pack("=HHI8x", socket.AF_INET, 0, 0)
OPERATIONS: dict[str, Callable[[Target], object]] = {
    # Files, by their paths.
    "open for reading": lambda t: os.open(t.file, os.O_RDONLY),
    "open for writing": lambda t: os.open(t.file, os.O_WRONLY),
    "create": lambda t: os.open(f"{t.folder}/new", os.O_CREAT | os.O_WRONLY),
    "openat2": lambda t: syscall(437, 437, -100, t.file.encode(), struct.pack("=QQQ", 0, 0, 0), 24),
    "truncate": lambda t: os.truncate(t.file, 0),
    "rename": lambda t: os.rename(t.file, f"{t.folder}/renamed"),
    "unlink": lambda t: os.unlink(t.file),
    "chmod": lambda t: os.chmod(t.file, 0),
    "chown": lambda t: os.chown(t.file, os.getuid(), -1),
    "utime": lambda t: os.utime(t.file, (0, 0)),
    "setxattr": lambda t: os.setxattr(t.file, "user.test", b""),
    "link": lambda t: os.link(t.file, f"{t.folder}/link"),
    "symlink": lambda t: os.symlink(t.file, f"{t.folder}/symlink"),
    "mkdir": lambda t: os.mkdir(f"{t.folder}/made"),
    "rmdir": lambda t: os.rmdir(f"{t.folder}/empty"),
    "mknod": lambda t: os.mkfifo(f"{t.folder}/fifo"),
    "list": lambda t: os.listdir(t.folder),
    "stat": lambda t: os.stat(t.file),
    "chdir": lambda t: os.chdir(t.folder),
    "chroot": lambda t: os.chroot(t.folder),
    "mount": lambda t: call("mount", b"none", t.folder.encode(), b"tmpfs", 0, None),
    "fsopen": lambda t: syscall(430, 430, b"tmpfs", 0),
    "pivot_root": lambda t: syscall(155, 41, t.folder.encode(), t.folder.encode()),
    "open_by_handle_at": lambda t: call("open_by_handle_at", 0, bytes(64), 0),
    "inotify": lambda t: call("inotify_init1", 0),
    # Programs and processes.
    "exec": lambda t: os.execv(t.program, [t.program, "--version"]),
    "exec from memory": lambda t: exec_from_memory(),
    "memfd": lambda t: os.memfd_create("test"),
    "fork": lambda t: os.fork() or os._exit(0),
    "vfork and exec": lambda t: os.posix_spawn(t.program, [t.program, "--version"], {}),
    "clone3": lambda t: syscall(435, 435, bytes(88), 88),
    "kill": lambda t: os.kill(t.pid, signal.SIGTERM),
    # Signal 0 needs the same permission, and would do no harm without a sandbox.
    "kill the group": lambda t: os.kill(0, 0),
    "kill all": lambda t: os.kill(-1, 0),
    "pidfd_open": lambda t: os.pidfd_open(t.pid),
    "ptrace": lambda t: call("ptrace", 16, t.pid, None, None),
    "process_vm_readv": lambda t: call("process_vm_readv", t.pid, None, 0, None, 0, 0),
    "setpriority": lambda t: os.setpriority(os.PRIO_PROCESS, t.pid, 19),
    "prlimit": lambda t: resource.prlimit(t.pid, resource.RLIMIT_CORE, (0, 0)),
    "kcmp": lambda t: syscall(312, 272, t.pid, t.pid, 1, 0, 0),
    # Connections to other processes.
    "socket of the internet": lambda t: socket.socket(socket.AF_INET),
    "socket of the machine": lambda t: socket.socket(socket.AF_UNIX),
    "socketpair": lambda t: socket.socketpair(),
    "bind": lambda t: of_some_socket("bind", UNIX),
    "connect": lambda t: of_some_socket("connect", INET),
    "send a descriptor": lambda t: call("sendmsg", 3, bytes(56), 0),
    "shared memory": lambda t: call("shmget", 0, 4096, 0o1600),
    "message queue": lambda t: call("msgget", 0, 0o1600),
    # The kernel.
    "keyctl": lambda t: syscall(250, 219, 0, -4, 1),
    "add_key": lambda t: syscall(248, 217, b"user", b"test", b"x", 1, -4),
    "bpf": lambda t: syscall(321, 280, 0, bytes(64), 64),
    "perf_event_open": lambda t: syscall(298, 241, bytes(128), 0, -1, -1, 0),
    "userfaultfd": lambda t: syscall(323, 282, 1),
    "io_uring_setup": lambda t: syscall(425, 425, 1, bytes(120)),
    "setns": lambda t: call("setns", 0, 0),
    "unshare": lambda t: call("unshare", 0x10000000),
    "capset": lambda t: call("capset", struct.pack("=II", 0x20080522, 0), bytes(24)),
    "setuid": lambda t: os.setuid(os.getuid()),
    "swapon": lambda t: call("swapon", t.file.encode(), 0),
    "reboot": lambda t: call("reboot", 0),
    "sethostname": lambda t: call("sethostname", b"test", 4),
    "kexec_load": lambda t: syscall(246, 104, 0, 0, None, 0),
    "init_module": lambda t: syscall(175, 105, bytes(8), 8, b""),
    "personality": lambda t: call("personality", ctypes.c_ulong(0xFFFFFFFF)),
}


def attempt(data: Bytes, limits: DecodingLimits) -> VideoFile:
    name, *fields = msgspec.json.decode(bytes(data[:]))
    try:
        OPERATIONS[name](Target(*fields))
    except OSError as error:
        raise Refusal("invalid", f"errno {error.errno}") from error
    raise Refusal("invalid", "it was done")


def main(descriptor: int) -> None:
    vars(formats)["open_video"] = attempt
    spawner.main(descriptor)


def run_all() -> dict[str, str]:
    """Return the outcome of each operation, and of all for the target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_text(CONTENT)
        (Path(folder) / "empty").mkdir()
        user = NOBODY if os.getuid() == 0 else None
        if user is not None:
            for path in (Path(folder), *Path(folder).iterdir()):
                os.chown(path, user, user)
        victim = subprocess.Popen(["sleep", "600"], user=user)
        pool = DecoderPool(LIMITS, 1, "tests.renderer.decoding.trying")
        reader, outcomes = Reader(pool), {}
        target = Target(str(file), folder, victim.pid, find_binary())
        try:
            before = _state(folder)
            for name in OPERATIONS:
                try:
                    reader.video(msgspec.json.encode([name, *target]), [0])
                except RequestError as error:
                    outcomes[name] = error.message
                except Exception as error:
                    outcomes[name] = f"the decoder ended: {error}"
            if _state(folder) != before or victim.poll() is not None:
                outcomes["the target"] = "changed"
        finally:
            pool.close()
            victim.kill()
            victim.wait()
    return outcomes


def _state(folder: str) -> list[tuple[object, ...]]:
    paths = [Path(folder), *sorted(Path(folder).iterdir())]
    stats = [(path, path.lstat()) for path in paths]
    return [(path, s.st_mode, s.st_uid, s.st_mtime_ns, s.st_nlink, s.st_size) for path, s in stats]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_all()))
