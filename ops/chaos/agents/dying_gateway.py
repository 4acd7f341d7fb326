"""A gateway in a process of its own that dies when it has stored a part of a response's beginning.

A response begins with three messages, which a gateway publishes at the same time. This one stores
those that it is told, and kills itself then.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from ops.chaos.patching import wrap
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.stage import runtime
from workers import settings
from workers.gateway.worker import main

STEP, TASK, TURN = "step", "task", "turn"
_FILTERS = {
    STEP: subjects.STEP_FILTER,
    TASK: subjects.RESPONSES_FILTER,
    TURN: subjects.REQUESTS_FILTER,
}


def die_behind(parts: set[str], report: Path) -> None:
    """Have this process store these parts of the first response, and no other, and die.

    The report then has the response's id.
    """
    missing = set(parts)

    async def store(part: str | None, publish: Callable[[], Awaitable[Any]], name: str) -> Any:
        if part is None:
            return await publish()
        if part not in parts:
            await asyncio.Event().wait()
        stored = await publish()
        missing.discard(part)
        if not missing:
            _die(report, name)
        return stored

    @wrap(Bus, "append")
    async def append(original: Any, self: Bus, subject: str, *rest: Any, **named: Any) -> Any:
        name = subject.rpartition(".")[2]
        return await store(_part_of(subject), lambda: original(self, subject, *rest, **named), name)

    @wrap(Bus, "publish")
    async def publish(
        original: Any, self: Bus, subject: str, data: bytes, msg_id: str, *rest: Any, **named: Any
    ) -> Any:
        part, name = _part_of(subject), msg_id.removesuffix("-t0")
        return await store(
            part, lambda: original(self, subject, data, msg_id, *rest, **named), name
        )


def _die(report: Path, name: str) -> None:
    report.write_text(name)
    os.kill(os.getpid(), signal.SIGKILL)


def _part_of(subject: str) -> str | None:
    for part, pattern in _FILTERS.items():
        if subject.startswith(pattern.rstrip("*>")):
            return part
    return None


if __name__ == "__main__":
    _, config_file, url, named_parts, report_file = sys.argv
    die_behind(set(named_parts.split("+")), Path(report_file))
    config = settings.load_config(Path(config_file))
    sys.exit(uvloop.run(runtime.run("gateway", main, config, url, None, None)))
