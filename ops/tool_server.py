"""A local MCP server of one tool, for the demo, the benchmarks and the faults."""

import threading
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class LocalToolServer:
    """Base of servers that run in a thread of this process, at a free port of this machine."""

    def __init__(self, tool: dict[str, Any]) -> None:
        """`tool` is the entry of the tool in `tools/list`."""
        self._tool = tool
        app = Starlette(routes=[Route("/mcp", self.answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_config=None))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        """Start the server, and return its URL."""
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/mcp"

    def stop(self) -> None:
        """Stop the server, and wait for its thread."""
        self._server.should_exit = True
        self._thread.join()

    async def answer(self, request: Request) -> JSONResponse:
        """Answer one message of JSON-RPC."""
        message = await request.json()
        result: dict[str, Any] = {}
        if message["method"] == "tools/list":
            result = {"tools": [self._tool]}
        elif message["method"] == "tools/call":
            text = await self.call(message["params"]["arguments"])
            result = {"content": [{"type": "text", "text": text}]}
        return JSONResponse({"jsonrpc": "2.0", "id": message.get("id"), "result": result})

    async def call(self, arguments: dict[str, Any]) -> str:
        """Carry out a call of the tool, and return its result."""
        raise NotImplementedError
