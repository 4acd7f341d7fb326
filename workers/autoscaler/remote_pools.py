"""What actuators have in common whose workers are processes of another system."""

import asyncio
from collections.abc import Sequence

import structlog

from shared.errors import PagemillError, Unavailable
from shared.state.scale_state import REPORT_AGE_S
from workers.actuator import REPORT_S
from workers.pools import Pools

# Slots of a pool are numbered from a multiple of this.
MAX_SLOTS = 10_000

_log = structlog.get_logger()


def first_slot(pools: Sequence[str], pool: str) -> int:
    return pools.index(pool) * MAX_SLOTS


class RemotePools:
    """Base of actuators that read and change another system's workers once a second."""

    host = ""

    def __init__(self, pools: Pools) -> None:
        self._pools = list(pools.by_name)
        self._seen_s = -REPORT_AGE_S
        self._asked = asyncio.Event()

    def pools(self) -> Sequence[str]:
        return self._pools

    def ask(self) -> None:
        """Let the next look be at once."""
        self._asked.set()

    async def read(self) -> None:
        """Read the workers of all pools, and change what the plan has asked for.

        Raises ConfigError for a refusal that another attempt will meet too, and Unavailable.
        """
        await self._read()
        self._seen_s = asyncio.get_running_loop().time()

    async def serve(self) -> None:
        """Keep pools as they are wanted, until cancelled."""
        while True:
            try:
                await self.read()
            except PagemillError as error:
                _log.warning("scale_failed", code=error.code, reason=error.message)
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()

    async def _read(self) -> None:
        raise NotImplementedError

    def _check_seen(self, reason: str) -> None:
        """Raise Unavailable unless workers were read lately."""
        if asyncio.get_running_loop().time() - self._seen_s > REPORT_AGE_S:
            raise Unavailable(reason)
