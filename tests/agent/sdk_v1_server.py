"""MCP servers of version 1 of the Python SDK, with sessions and without them, one for each path.

    python sdk_v1_server.py PORT

It prints its port once it accepts connections.
"""

import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from mcp.server.fastmcp import FastMCP  # type: ignore[attr-defined]
from starlette.applications import Starlette
from starlette.routing import Mount

KINDS = [(state, form) for state in ("stateful", "stateless") for form in ("sse", "json")]


def new_server(state: str, form: str) -> Any:
    stateless, as_json = state == "stateless", form == "json"
    server = FastMCP(
        "calc", stateless_http=stateless, json_response=as_json, streamable_http_path="/"
    )

    @server.tool()  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return server


def new_app() -> Starlette:
    servers = {f"/{state}-{form}": new_server(state, form) for state, form in KINDS}
    mounts = [Mount(path, server.streamable_http_app()) for path, server in servers.items()]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for server in servers.values():
                await stack.enter_async_context(server.session_manager.run())
            yield

    return Starlette(routes=mounts, lifespan=lifespan)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    config = uvicorn.Config(new_app(), log_level="error", timeout_graceful_shutdown=1)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
