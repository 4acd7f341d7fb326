"""Trial of a grammar: compiles it in a sandbox process and decides whose fault a failure is.

CPU time and memory depend on the grammar, so exceeding their limits is the client's fault. Wall
time depends on the load of the machine, so a timeout is not the grammar's fault.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from subprocess import DEVNULL, Popen

from shared.errors import GrammarNotTried
from workers.engine.sampling import grammar_sandbox
from workers.engine.sampling.grammar_sandbox import BEGUN, MAX_MEMORY_BYTES, TOO_COMPLEX

FIELD = "sampling_params.structured_outputs"
MAX_CPU_S = 5
TURN_S = 30.0
"""Interval after which a trial ends if it got no CPU time, or if another tenant waits for its slot.
Most grammars take 0.1 s of CPU time, so they pass with a hundredth of a core."""
_CPUCLOCK_SCHED = 2
MAX_OUTPUT = 4096
NOT_STARTED = "its trial could not be started"
NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals from outside the sandbox, such as the kernel's when the machine is out of memory."""


async def check_grammar(definition: str, is_slot_wanted: Callable[[], bool], niceness: int) -> str:
    """Return the reason for which the grammar cannot be used; empty if it can.

    `is_slot_wanted` returns whether another tenant waits, and `niceness` is added to the niceness
    of the sandbox process, as nice(2) does. Raises GrammarNotTried if the machine has no time or no
    process for the trial, or if the trial was ended from outside.
    """
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            process = _start(theirs, niceness)
        try:
            output = await _output_of(process.pid, ours, definition, is_slot_wanted)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)
    _, begun, reason = output.decode().partition(BEGUN)
    if not begun:
        raise _not_tried(NOT_STARTED)
    return _reason_of_end(process.returncode, reason)


def _start(channel: socket.socket, niceness: int) -> Popen[bytes]:
    # uvloop holds the GIL for about ten milliseconds to start a process, and the model waits for
    # it. Popen holds the GIL for one or two.
    try:
        process = Popen(
            [sys.executable, "-P", grammar_sandbox.__file__, str(MAX_CPU_S)],
            stdin=channel.fileno(),
            stdout=channel.fileno(),
            stderr=DEVNULL,
        )
    except OSError as error:  # No memory, processes or file descriptors are left.
        raise _not_tried(NOT_STARTED) from error
    with contextlib.suppress(ProcessLookupError):
        # Set here and not by the process itself, because most of its time is its start.
        os.setpriority(os.PRIO_PROCESS, process.pid, os.nice(0) + niceness)
    return process


async def _output_of(
    pid: int, channel: socket.socket, definition: str, is_slot_wanted: Callable[[], bool]
) -> bytes:
    exchange = asyncio.create_task(_exchange(channel, definition.encode()))
    cpu_s = 0.0
    try:
        while not (await asyncio.wait([exchange], timeout=TURN_S))[0]:
            before, cpu_s = cpu_s, _cpu_s(pid)
            if cpu_s == before or is_slot_wanted():
                raise _not_tried(
                    f"its trial had no result within {TURN_S:g} s, because the machine is busy"
                )
        return exchange.result()
    finally:
        exchange.cancel()


async def _exchange(channel: socket.socket, definition: bytes) -> bytes:
    """Return all that the sandbox writes, until it closes its end."""
    loop, output = asyncio.get_running_loop(), b""
    # A sandbox may end before it has read everything, and may have written the reason.
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(channel, definition)
        channel.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(channel, MAX_OUTPUT):
            output += part
    return output


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process; 0 if the process is gone."""
    try:
        # The clock that clock_getcpuclockid(3) returns, which Python does not have.
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def _reason_of_end(returncode: int | None, reason: str) -> str:
    if returncode == 0:
        return reason
    if returncode == -signal.SIGXCPU:
        return f"{TOO_COMPLEX}: compiling it takes more than {MAX_CPU_S} s of CPU time"
    if returncode is not None and -returncode in NOT_BY_ITSELF:
        raise _not_tried(f"its trial was ended from outside, by signal {-returncode}")
    memory_gib = MAX_MEMORY_BYTES / (1 << 30)
    return f"{TOO_COMPLEX}: it takes more than {memory_gib:g} GiB of memory, or is nested too deep"


def _not_tried(reason: str) -> GrammarNotTried:
    return GrammarNotTried(f"this grammar could not be checked: {reason}", field=FIELD)
