"""An MCP server that counts the calls of its tool."""

import asyncio
import logging
import random
from collections import Counter
from typing import Any

from ops.tool_server import LocalToolServer

MAX_PAUSE_S = 0.3
SCHEMA = {"type": "object", "properties": {"call": {"type": "string"}}}


class CountingServer(LocalToolServer):
    """A tool that takes some time, and is not idempotent."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__({"name": "book", "inputSchema": SCHEMA})
        self.num_made: Counter[str] = Counter()
        """Number of times that each call was made."""
        self._rng = rng

    def start(self) -> str:
        # Killed clients are expected here.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        return super().start()

    async def call(self, arguments: dict[str, Any]) -> str:
        self.num_made[arguments["call"]] += 1
        await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))
        return "booked"
