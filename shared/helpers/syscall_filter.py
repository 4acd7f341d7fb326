"""Filter of system calls (seccomp): a process may only compute and use its descriptors.

All other calls fail with EPERM. Standard library alone.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_AT_EMPTY_PATH = 0x1000

# The kernel's names of processors.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers of the calls on x86_64 and on aarch64, the most frequent calls first.
_ALLOWED: Mapping[str, tuple[int | None, int | None]] = MappingProxyType(
    {
        # Descriptors.
        "read": (0, 63),
        "write": (1, 64),
        "sendto": (44, 206),
        "recvfrom": (45, 207),
        "lseek": (8, 62),
        "pread64": (17, 67),
        "readv": (19, 65),
        "writev": (20, 66),
        "fstat": (5, 80),
        "poll": (7, None),
        "ppoll": (271, 73),
        "close": (3, 57),
        # Memory.
        "mmap": (9, 222),
        "munmap": (11, 215),
        "mremap": (25, 216),
        "madvise": (28, 233),
        "mprotect": (10, 226),
        "brk": (12, 214),
        # Time, threads of this process, and facts.
        "futex": (202, 98),
        "clock_gettime": (228, 113),
        "clock_getres": (229, 114),
        "clock_nanosleep": (230, 115),
        "nanosleep": (35, 101),
        "gettimeofday": (96, 169),
        "time": (201, None),
        "times": (100, 153),
        "getrusage": (98, 165),
        "getrandom": (318, 278),
        "getpid": (39, 172),
        "gettid": (186, 178),
        "getcpu": (309, 168),
        "sched_yield": (24, 124),
        "sched_getaffinity": (204, 123),
        "sysinfo": (99, 179),
        "uname": (63, 160),
        "membarrier": (324, 283),
        "rseq": (334, 293),
        "set_robust_list": (273, 99),
        # Signals of this process, and its end.
        "rt_sigaction": (13, 134),
        "rt_sigprocmask": (14, 135),
        "rt_sigreturn": (15, 139),
        "sigaltstack": (131, 132),
        "restart_syscall": (219, 128),
        "exit": (60, 93),
        "exit_group": (231, 94),
    }
)


class _Limited(NamedTuple):
    """A call that is allowed with one value of an argument."""

    numbers: tuple[int, int]
    argument: int
    value: int


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("on_true", ctypes.c_uint8),
        ("on_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("num_instructions", ctypes.c_uint16),
        ("instructions", ctypes.POINTER(_Instruction)),
    )


# Codes of the instructions, and places in the kernel's description of a call.
_LOAD, _COMPARE, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM

_Target = Literal["next", "skip", "refuse", "allow"]

_libc = ctypes.CDLL(None, use_errno=True)


def is_available() -> bool:
    """Return whether the kernel has filters, and this module knows the processor's calls."""
    if _column() is None:
        return False
    # A kernel that has filters reads the program first, and one that has none refuses the mode.
    ctypes.set_errno(0)
    _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def install() -> bool:
    """Filter the calls of this process for the rest of its life.

    Returns whether this was possible. The process needs `no_new_privs`, and one thread.
    """
    column = _column()
    if column is None:
        return False
    instructions = _compile(column, os.getpid())
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    return bool(_libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _column() -> int | None:
    """Return the column of this processor's numbers; None for an unknown processor."""
    machine = os.uname().machine
    if sys.platform != "linux" or sys.maxsize < 2**32 or machine not in _ARCHITECTURES:
        return None
    return list(_ARCHITECTURES).index(machine)


def _compile(column: int, pid: int) -> list[_Instruction]:
    """Return the program: it compares the number of a call with each number that is allowed."""
    limited = (
        # The process may end itself by a signal, and sends none to others.
        _Limited((62, 129), 0, pid),
        _Limited((234, 131), 0, pid),
        # C libraries implement `fstat` by it. Landlock and the root of the process refuse paths.
        _Limited((262, 79), 3, _AT_EMPTY_PATH),
    )
    steps: list[tuple[int, int, _Target, _Target]] = [
        (_LOAD, _ARCHITECTURE_AT, "next", "next"),
        (_COMPARE, list(_ARCHITECTURES.values())[column], "next", "refuse"),
        (_LOAD, _NUMBER_AT, "next", "next"),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            steps.append((_COMPARE, number, "allow", "next"))
    for call in limited:
        steps += [
            (_COMPARE, call.numbers[column], "next", "skip"),
            (_LOAD, _ARGUMENTS_AT + 8 * call.argument, "next", "next"),
            (_COMPARE, call.value, "allow", "refuse"),
        ]
    refuse_at = len(steps)
    instructions = []
    for number, (code, value, on_true, on_false) in enumerate(steps):
        distance = {"next": 0, "skip": 2, "refuse": refuse_at - number - 1}
        distance["allow"] = distance["refuse"] + 1
        instructions.append(_Instruction(code, distance[on_true], distance[on_false], value))
    instructions.append(_Instruction(_RETURN, 0, 0, _REFUSE))
    instructions.append(_Instruction(_RETURN, 0, 0, _ALLOW))
    return instructions
