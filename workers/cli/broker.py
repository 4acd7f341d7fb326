"""The connection of a command to the broker."""

import contextlib
from collections.abc import AsyncIterator

from shared.bus.bus import Bus
from shared.bus.login import Login

# A user waits at the terminal, so a server that is down is reported after a short time.
CONNECT_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def connected(
    login: Login, name: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncIterator[Bus]:
    """Connect to the broker for one command. Raises Unavailable after `timeout_s`."""
    bus = await Bus.connect(login, name, timeout_s)
    try:
        yield bus
    finally:
        await bus.close()
