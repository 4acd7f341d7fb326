"""Servers of version 1 of the official Python SDK, in separate processes."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.net.targets import Target
from shared.protocol.steps import ApprovedCall, ServerUse
from shared.responses.tools import schema_digest
from tests.agent.test_mcp_client import CONFIG, no_mark
from tests.agent.test_worker import BEGUN, begin, carry_out, context_of, first_result
from tests.pypi import python_with
from workers.agent.mcp_client import McpClient, Server
from workers.agent.mcp_protocol import output_of
from workers.agent.mcp_session import McpSession

SCRIPT = Path(__file__).parent / "sdk_v1_server.py"
# The oldest version that works. It needs older versions of what it requires.
VERSIONS = {
    "1.30": ["mcp==1.30.0"],
    "1.10": ["mcp==1.10.1", "pydantic<2.12", "sse-starlette<3", "starlette<0.47"],
}
PATHS = [f"/{state}-{form}/" for state in ("stateful", "stateless") for form in ("sse", "json")]


@contextmanager
def serving(python: Path, port: int = 0) -> Iterator[int]:
    """Run the servers, and yield their port."""
    command = [str(python), str(SCRIPT), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(VERSIONS[request.param], tmp_path_factory.mktemp("sdk") / "venv")


@pytest.fixture(scope="module")
def port(python: Path) -> Iterator[int]:
    with serving(python) as number:
        yield number


def session_at(client: McpClient, port: int, path: str) -> McpSession:
    return McpSession(client, Server("", "calc", Target("http", "127.0.0.1", port, path)))


@pytest.mark.parametrize("path", PATHS)
async def test_a_response_lists_and_calls_the_tools(bus: Bus, port: int, path: str) -> None:
    client = McpClient(CONFIG)
    async with aclosing(session_at(client, port, path)) as session:
        (add,) = await session.list_tools()
    await client.close()
    arguments = '{"a": 2, "b": 3}'
    approved = [ApprovedCall("mcpr_1", "calc", "add", arguments, schema_digest(add))]
    log = await begin(bus, replace(BEGUN, servers=[ServerUse("calc")], approved=approved))
    context = context_of(bus, servers={"calc": {"url": f"http://127.0.0.1:{port}{path}"}})
    running = asyncio.create_task(carry_out(context, log))
    result = await first_result(log)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (result.outcome, result.output) == ("result", "5")


@pytest.mark.parametrize(
    "path", [PATHS[0], *(pytest.param(path, marks=pytest.mark.long) for path in PATHS[1:])]
)
async def test_calls_continue_after_a_restart_of_the_server(python: Path, path: str) -> None:
    """A new process does not know the session, and several calls find out at the same time."""
    client = McpClient(CONFIG)
    with serving(python) as port:
        session = session_at(client, port, path)
        await session.list_tools()
    with serving(python, port):
        calls = [session.call("add", {"a": n, "b": 1}, None, no_mark) for n in range(4)]
        results = await asyncio.gather(*calls)
        assert [output_of(result) for result in results] == ["1", "2", "3", "4"]
        await session.aclose()
    await client.close()
