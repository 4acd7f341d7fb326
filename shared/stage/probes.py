"""Answers of a worker's metrics listener on `/health` and `/ready`."""

import asyncio
from collections.abc import Callable

from shared.protocol.encoding import to_json
from shared.protocol.versions import readable
from shared.protocol.worker_status import WorkerStatus
from shared.telemetry.prometheus import Probe

HANGS = "hangs"

# Compiling a grammar for a large vocabulary can hold the interpreter for a second.
LOOP_TIMEOUT_S = 5.0


def new_probes(
    role: str, worker: str, version: str, read_status: Callable[[], str]
) -> dict[str, Probe]:
    """Return the probes of a worker by name. Threads of an HTTP server call them.

    `read_status` returns `ok` if the worker accepts work. It is called in the running event loop,
    so that all probes fail when the loop hangs.
    """
    loop = asyncio.get_running_loop()

    async def read_in_loop() -> str:
        return read_status()

    def ask_loop() -> str:
        status = asyncio.run_coroutine_threadsafe(read_in_loop(), loop)
        try:
            return status.result(LOOP_TIMEOUT_S)
        except TimeoutError:
            status.cancel()
            return HANGS

    def report(status: str) -> tuple[bool, bytes]:
        answer = WorkerStatus(role, worker, status, version, readable())
        return answer.is_ok, to_json(answer)

    return {
        "health": lambda: report(HANGS if ask_loop() == HANGS else "ok"),
        "ready": lambda: report(ask_loop()),
    }
