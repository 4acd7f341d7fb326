"""Trial of a grammar: compiles it in a sandbox process and decides whose fault a failure is.

CPU time and memory depend on the grammar, so exceeding their limits is the client's fault. Wall
time depends on the load of the machine, so a timeout is not the grammar's fault.
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable

from shared.errors import GrammarNotTried
from shared.helpers.forking import MAX_REPORT_BYTES, Forks, read_end, read_pid
from workers.engine.sampling.grammar_errors import TOO_COMPLEX
from workers.engine.sampling.grammar_sandbox import BEGUN, MAX_MEMORY_BYTES

FIELD = "sampling_params.structured_outputs"
MAX_CPU_S = 5
START_S = 30.0
"""Time for the fork of a sandbox, and for the first one's fork server."""
TURN_S = 30.0
"""Interval after which a trial ends if it got no CPU time, or if another tenant waits for its slot.
Most grammars take 0.1 s of CPU time, so they pass with a hundredth of a core."""
_CPUCLOCK_SCHED = 2
MAX_OUTPUT = 4096
NOT_STARTED = "its trial could not be started"
NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals from outside the sandbox, such as the kernel's when the machine is out of memory."""

# The first trial of this process starts the server, which ends with the process.
_sandboxes = Forks("workers.engine.sampling.grammar_sandbox")


async def check_grammar(definition: str, is_slot_wanted: Callable[[], bool], niceness: int) -> str:
    """Return the reason for which the grammar cannot be used; empty if it can.

    `is_slot_wanted` returns whether another tenant waits, and `niceness` is added to the niceness
    of the sandbox process, as nice(2) does. Raises GrammarNotTried if the machine has no time or no
    process for the trial, or if the trial was ended from outside.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            report = _start(theirs, niceness)
        with report:  # Closing it ends the sandbox.
            report.setblocking(False)
            pid = await _pid_of(report)
            output = await _output_of(pid, ours, definition, is_slot_wanted)
            try:
                code = read_end(await loop.sock_recv(report, MAX_REPORT_BYTES)).code
            except ConnectionError:
                code = -signal.SIGKILL  # The server has ended, and has killed its children.
    _, begun, reason = output.partition(BEGUN)
    if not begun:
        raise _not_tried(NOT_STARTED)
    return _reason_of_end(code, reason.decode())


def _start(channel: socket.socket, niceness: int) -> socket.socket:
    """Have a sandbox started, and return its report."""
    try:
        return _sandboxes.fork(b"%d %d" % (MAX_CPU_S, niceness), [channel.fileno()])
    except OSError as error:  # No memory, processes or file descriptors are left.
        raise _not_tried(NOT_STARTED) from error


async def _pid_of(report: socket.socket) -> int:
    try:
        async with asyncio.timeout(START_S):
            return read_pid(await asyncio.get_running_loop().sock_recv(report, MAX_REPORT_BYTES))
    except OSError as error:
        raise _not_tried(NOT_STARTED) from error


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


def _reason_of_end(code: int, reason: str) -> str:
    if code == 0:
        return reason
    if code == -signal.SIGXCPU:
        return f"{TOO_COMPLEX}: compiling it takes more than {MAX_CPU_S} s of CPU time"
    if -code in NOT_BY_ITSELF:
        raise _not_tried(f"its trial was ended from outside, by signal {-code}")
    memory_gib = MAX_MEMORY_BYTES / (1 << 30)
    return f"{TOO_COMPLEX}: it takes more than {memory_gib:g} GiB of memory, or is nested too deep"


def _not_tried(reason: str) -> GrammarNotTried:
    return GrammarNotTried(f"this grammar could not be checked: {reason}", field=FIELD)
