"""Bugs of agents, each planted in the process of an agent."""

from collections.abc import Mapping
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.bugs.scenarios import AGENTS
from ops.chaos.patching import replace_attribute, wrap


@bug("agent", AGENTS, "A2")
def journal_after_call() -> None:
    from workers.agent.mcp_client import Mark
    from workers.agent.mcp_session import McpSession

    @wrap(McpSession, "call")
    async def late(
        call: Any,
        self: McpSession,
        name: str,
        arguments: Mapping[str, Any],
        key: str | None,
        mark: Mark,
    ) -> Any:
        async def nothing() -> None:
            pass

        result = await call(self, name, arguments, key, nothing)
        await mark()
        return result


@bug("agent", AGENTS, "A2")
def repeat_what_is_unknown() -> None:
    from shared.responses.calls import ServerCall
    from workers.agent.tools import ToolRunner

    def always(self: ToolRunner, call: ServerCall) -> bool:
        return True

    replace_attribute(ToolRunner, "_may_repeat", always)


@bug("agent", AGENTS, "A1")
def acknowledged_before_the_end() -> None:
    from shared.stage.job import Job
    from workers.agent.worker import Agent

    @wrap(Agent, "_handle")
    async def early(handle: Any, self: Agent, job: Job) -> None:
        await job.delivery.ack()
        await handle(self, job)
