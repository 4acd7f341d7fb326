"""An agent or a gateway with a report of its work, a planted bug, or a planned death.

    python -m ops.chaos.agents.worker ROLE CONFIG URL REPORT BUG PARTS

An agent reports when it starts and stops to work on a response. With PARTS, a gateway stores these
parts of the beginning of a response and no other, reports the id of the response, and kills itself.
A response begins with three messages, which a gateway publishes at the same time.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from ops.chaos.bugs import catalog
from ops.chaos.patching import wrap
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.stage import runtime
from shared.stage.job import Job
from workers import settings
from workers.cli.commands.worker import load_main
from workers.roles import AGENT

STEP, TASK, TURN = "step", "task", "turn"
_FILTERS = {
    STEP: subjects.STEP_FILTER,
    TASK: subjects.RESPONSES_FILTER,
    TURN: subjects.REQUESTS_FILTER,
}
TAKEN, LEFT = "+", "-"
"""First letters of the lines of an agent's report, each with the id of a response."""


def taken_in(report: str) -> set[str]:
    """Return all responses that the agent has worked on."""
    return {line[1:] for line in report.splitlines()}


def held_in(report: str) -> set[str]:
    """Return the responses that the agent holds; it may work on one of them twice at a time."""
    held = Counter[str]()
    for line in report.splitlines():
        held[line[1:]] += 1 if line.startswith(TAKEN) else -1
    return {name for name, count in held.items() if count > 0}


def report_responses(report: Path) -> None:
    """Have the agent report when it starts and stops to work on a response."""
    from workers.agent.worker import Agent

    file = report.open("ab", buffering=0)

    @wrap(Agent, "_handle")
    async def handle(original: Any, self: Agent, job: Job) -> None:
        file.write(f"{TAKEN}{job.request_id}\n".encode())
        try:
            await original(self, job)
        finally:
            file.write(f"{LEFT}{job.request_id}\n".encode())


def die_after(parts: set[str], report: Path) -> None:
    """Have this process store these parts of the first response and no other, and then die."""
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
        return await store(
            _part_of(subject), lambda: original(self, subject, data, msg_id, *rest, **named), msg_id
        )

    @wrap(Bus, "publish_without_id")
    async def publish_without_id(
        original: Any, self: Bus, subject: str, *rest: Any, **named: Any
    ) -> Any:
        part, name = _part_of(subject), subjects.last_token(subject).removesuffix("~t0")
        return await store(part, lambda: original(self, subject, *rest, **named), name)


def _die(report: Path, name: str) -> None:
    report.write_text(name)
    os.kill(os.getpid(), signal.SIGKILL)


def _part_of(subject: str) -> str | None:
    for part, pattern in _FILTERS.items():
        if subject.startswith(pattern.rstrip("*>")):
            return part
    return None


def _main(role: str, config_file: str, url: str, report: str, bug: str, parts: str) -> int:
    main = load_main(role)
    catalog.plant(bug, role)
    if parts:
        die_after(set(parts.split("+")), Path(report))
    if role == AGENT:
        report_responses(Path(report))
    config = settings.load_config(Path(config_file))
    return uvloop.run(runtime.run(role, main, config, url, None, None))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
