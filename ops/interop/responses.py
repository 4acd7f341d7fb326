"""Test responses between programs of other projects.

    python -m ops.interop.responses

Our agent calls MCP servers of versions 1 and 2 of the TypeScript SDK, and the client is the example
of openai-agents for hosted MCP tools. It needs npm and the registries. A scripted model stands in
for one that calls tools. Exits 0 only if the client prints the right answers after two calls of
each server.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.chaos.agents.scripted_model import MODEL
from ops.chaos.agents.system import AgentSystem
from ops.harness.tables import console
from ops.interop.environments import NODE, node_with_packages, python_with
from shared.protocol.requests import GenerateRequest

HERE = Path(__file__).parent
CLIENT = "openai-agents"
SERVERS = ("mcp_server_v1.mjs", "mcp_server_v2.mjs")
ANSWER = "It is 42."
EXPECTED = f"{ANSWER}\n{ANSWER} True\n"


def script(request: GenerateRequest, _: str) -> str:
    """Call the tool to multiply 6 by 7, then report its result."""
    results = [message for message in request.messages or [] if message.role == "tool"]
    if results:
        return f"It is {results[-1].content}."
    call = {"name": "calc__multiply", "arguments": {"a": 6, "b": 7}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def talk(folder: Path, server_url: str, python: Path) -> str:
    """Run the example, and return its output."""
    system = AgentSystem(folder, {"mcp_hosts": ["127.0.0.1"]})
    async with system.running(script):
        await system.start()
        names = {
            "OPENAI_BASE_URL": f"{system.url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_DEFAULT_MODEL": MODEL,
        }
        example = await asyncio.create_subprocess_exec(
            python,
            HERE / "hosted_mcp.py",
            server_url,
            env=os.environ | names,
            stdout=subprocess.PIPE,
        )
        output, _ = await example.communicate()
        return output.decode()


def main() -> int:
    programs, python = node_with_packages(), python_with(CLIENT)
    return max(run(programs, python, server) for server in SERVERS)


def run(programs: Path, python: Path, server: str) -> int:
    """Run the example with an MCP server; return 0 only for the right answers and calls."""
    command = [NODE, server]
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-interop-") as folder,
        subprocess.Popen(command, cwd=programs, stdout=subprocess.PIPE, text=True) as node,
    ):
        assert node.stdout is not None
        url = node.stdout.readline().strip()
        output = asyncio.run(talk(Path(folder), url, python))
        node.kill()
        calls = node.stdout.read().splitlines()
    console.print(f"{CLIENT} and {server}: {output!r}; {len(calls)} calls")
    return int(output != EXPECTED or calls != ["multiply 6 7"] * 2)


if __name__ == "__main__":
    sys.exit(main())
