"""Trial of a grammar: compiles it in a sandbox process and tells whose fault a failure is.

CPU time and memory are the grammar's own, so exceeding them is the client's fault. Wall time
depends on what else the machine does, so running out of it says nothing about the grammar.
"""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE

from shared.errors import GrammarNotTried
from workers.engine.sampling import grammar_sandbox
from workers.engine.sampling.grammar_sandbox import BEGUN, MAX_MEMORY_BYTES, TOO_COMPLEX

FIELD = "sampling_params.structured_outputs"
MAX_CPU_S = 5
MAX_WALL_S = 30.0
"""Most grammars take 0.1 s of CPU time, so they pass with a hundredth of a core."""
NOT_STARTED = "its trial could not be started"
NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals from outside of the sandbox, such as the kernel's when the machine is out of memory."""


async def check_grammar(definition: str) -> str:
    """Return the reason for which the grammar cannot be used; empty if it can.

    Raises GrammarNotTried if the machine has no time or no process for the trial, or ends it.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", grammar_sandbox.__file__, str(MAX_CPU_S)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
        )
    except OSError as error:  # No memory, processes or file descriptors are left.
        raise _not_tried(NOT_STARTED) from error
    try:
        async with asyncio.timeout(MAX_WALL_S):
            output, _ = await process.communicate(definition.encode())
    except TimeoutError:
        raise _not_tried(
            f"its trial had no result within {MAX_WALL_S:g} s, because the machine is busy"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    _, begun, reason = output.decode().partition(BEGUN)
    if not begun:
        raise _not_tried(NOT_STARTED)
    return _reason_of_end(process.returncode, reason)


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
