"""Test responses between programs of other projects.

    python -m ops.interop.responses

Our agent calls an MCP server of the TypeScript SDK, and the client is the hosted-MCP example of
openai-agents. It needs node, npm and their registries. A scripted model stands in for one that
calls tools. Exits 0 only if the client prints the right answers after two calls.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from ops.chaos.agents.scripted_model import MODEL
from ops.chaos.agents.system import AgentSystem
from shared.protocol.requests import GenerateRequest

HERE = Path(__file__).parent
AGENTS = "openai-agents"
ANSWER = "It is 42."
EXPECTED = f"{ANSWER}\n{ANSWER} True\n"


def script(request: GenerateRequest, _: str) -> str:
    """Call the tool to multiply 6 by 7, then report its result."""
    results = [message for message in request.messages or [] if message.role == "tool"]
    if results:
        return f"It is {results[-1].content}."
    call = {"name": "calc__multiply", "arguments": {"a": 6, "b": 7}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def install(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the server and the Python that has openai-agents."""
    server = folder / "mcp_server"
    shutil.copytree(HERE / "mcp_server", server)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=server, check=True
    )
    environment = folder / "agents"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", AGENTS], check=True)
    return server, python


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
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="pagemill-interop-") as name:
        folder = Path(name)
        server, python = install(folder)
        command = ["node", "server.mjs"]
        with subprocess.Popen(command, cwd=server, stdout=subprocess.PIPE, text=True) as node:
            assert node.stdout is not None
            url = node.stdout.readline().strip()
            output = asyncio.run(talk(folder, url, python))
            node.kill()
            calls = node.stdout.read().splitlines()
    console.print(f"openai-agents: {output!r}; the server was called {len(calls)} times")
    return int(output != EXPECTED or calls != ["multiply 6 7"] * 2)


if __name__ == "__main__":
    sys.exit(main())
