"""Bugs of agents, each planted in the process of an agent."""

from collections.abc import Mapping
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.bugs.scenarios import AGENTS
from ops.chaos.patching import replace_attribute


@bug("agent", AGENTS, "A2")
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


@bug("agent", AGENTS, "A2")
def repeat_what_is_unknown() -> None:
    from shared.responses.calls import ServerCall
    from workers.agent.tools import ToolRunner

    def always(self: ToolRunner, call: ServerCall) -> bool:
        return True

    replace_attribute(ToolRunner, "_may_repeat", always)


@bug("agent", AGENTS, "A1")
def acknowledged_before_the_end() -> None:
    from shared.bus.consumer import Delivery
    from workers.agent.worker import Agent

    handle = Agent._handle

    async def early(self: Agent, delivery: Delivery) -> None:
        await delivery.ack()
        await handle(self, delivery)

    replace_attribute(Agent, "_handle", early)
