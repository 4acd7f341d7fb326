"""The example of openai-agents for hosted MCP tools: nothing in it is about Pagemill.

The client's environment names the server: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_DEFAULT_MODEL.
"""

import asyncio
import sys

from agents import Agent, HostedMCPTool, Runner
from agents.tracing import set_tracing_disabled


async def main(server_url: str) -> None:
    tool = HostedMCPTool(
        tool_config={
            "type": "mcp",
            "server_label": "calc",
            "server_url": server_url,
            "require_approval": "never",
        }
    )
    agent = Agent(name="Assistant", tools=[tool])
    result = await Runner.run(agent, "How much is 6 times 7?")
    sys.stdout.write(f"{result.final_output}\n")
    streamed = Runner.run_streamed(agent, "How much is 6 times 7?")
    kinds = [event.type async for event in streamed.stream_events()]
    sys.stdout.write(f"{streamed.final_output} {len(kinds) > 10}\n")


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(main(sys.argv[1]))
