"""Bugs of agents, each planted in the process of an agent; the checks must find every one."""

from collections.abc import Callable, Mapping
from typing import Any

from ops.chaos.patching import replace_attribute

Plant = Callable[[], None]
BUGS: dict[str, tuple[Plant, str]] = {}
"""What plants each bug, and the check that finds it."""


def _bug(check: str) -> Callable[[Plant], Plant]:
    def declare(plant: Plant) -> Plant:
        BUGS[plant.__name__] = plant, check
        return plant

    return declare


@_bug("A2")
def journal_after_call() -> None:
    from workers.agent.mcp_client import Mark
    from workers.agent.mcp_session import McpSession

    call = McpSession.call

    async def late(
        self: McpSession, name: str, arguments: Mapping[str, Any], key: str | None, mark: Mark
    ) -> dict[str, Any]:
        async def nothing() -> None:
            pass

        result = await call(self, name, arguments, key, nothing)
        await mark()
        return result

    replace_attribute(McpSession, "call", late)


@_bug("A2")
def repeat_what_is_unknown() -> None:
    from shared.responses.calls import ServerCall
    from workers.agent.tools import ToolRunner

    def always(self: ToolRunner, call: ServerCall) -> bool:
        return True

    replace_attribute(ToolRunner, "_may_repeat", always)


@_bug("A3")
def step_without_fence() -> None:
    from shared.bus.bus import Bus

    async def append(
        self: Bus,
        subject: str,
        data: bytes,
        last_sequence: int,
        ttl_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        ack = await self._publish(subject, data, dict(headers or {}))
        assert ack is not None
        return ack.seq

    replace_attribute(Bus, "append", append)


@_bug("A1")
def acknowledged_before_the_end() -> None:
    from shared.stage.job import Job
    from workers.agent.worker import Agent

    handle = Agent._handle

    async def early(self: Agent, job: Job) -> None:
        await job.delivery.ack()
        await handle(self, job)

    replace_attribute(Agent, "_handle", early)
