"""The connection of a command to the broker."""

import contextlib
from collections.abc import AsyncIterator

from shared.bus.bus import Bus
from shared.bus.login import Login

# A user waits at the terminal, so a server that is down is reported after a short time.
CONNECT_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def connected(login: Login, name: str) -> AsyncIterator[Bus]:
    """Connect to the broker for one command. Raises Unavailable."""
    bus = await Bus.connect(login, name, CONNECT_TIMEOUT_S)
    try:
        yield bus
    finally:
        await bus.close()
