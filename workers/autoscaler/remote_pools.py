"""What actuators have in common whose workers are processes of another system."""

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from shared.errors import ConfigError, PagemillError, Unavailable
from shared.state.scale_state import REPORT_AGE_S
from workers.actuator import REPORT_S, Actuator
from workers.pools import Pools

# Slots of a pool are numbered from a multiple of this.
MAX_SLOTS = 10_000
# A failure that stays the same is told so often.
TELL_S = 60.0

_log = structlog.get_logger()


class RemotePools(Actuator):
    """Base of actuators that read and change another system's workers once a second.

    What fails with one pool concerns that pool alone: it is left out of the report, so that it
    stays as it is, and the others are scaled.
    """

    host = ""

    def __init__(self, pools: Pools) -> None:
        self._pools = list(pools.by_name)
        self._first_slots = {name: n * MAX_SLOTS for n, name in enumerate(self._pools)}
        self._seen_s: dict[str, float] = {}
        """When the workers of each pool were last read."""
        self._told_s: dict[tuple[str, str], float] = {}
        """When each failure of a pool was last told."""
        self._asked = asyncio.Event()

    def pools(self) -> Sequence[str]:
        if not (known := [pool for pool in self._pools if self._is_known(pool)]):
            raise Unavailable("the workers of no pool were read lately")
        return known

    def ask(self) -> None:
        """Let the next look be at once."""
        self._asked.set()

    async def read(self) -> dict[str, PagemillError]:
        """Read each pool's workers, and change what the plan has asked for.

        Return the failures, by pool.
        """
        failures = {}
        for pool in self._pools:
            try:
                await self._read(pool)
                self._seen_s[pool] = asyncio.get_running_loop().time()
                await self._change(pool)
            except PagemillError as error:
                failures[pool] = error
        return failures

    async def check(self) -> None:
        """Read the workers for the first time.

        Raises ConfigError for a refusal that another attempt will meet too, and Unavailable if the
        workers of no pool can be read.
        """
        failures = await self.read()
        for pool, error in failures.items():
            if isinstance(error, ConfigError):
                raise ConfigError(f"pool {pool}: {error.message}", field=error.field)
        if failures and not self._seen_s:
            raise next(iter(failures.values()))
        self._tell(failures)

    async def serve(self) -> None:
        """Keep pools as they are wanted, until cancelled."""
        while True:
            self._tell(await self.read())
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()

    async def _read(self, pool: str) -> None:
        """Read a pool's workers.

        Raises ConfigError for a refusal that another attempt will meet too, and Unavailable for
        everything else.
        """
        raise NotImplementedError

    async def _change(self, pool: str) -> None:
        """Change what the plan has asked for since the last time. Raises as `_read` does."""
        raise NotImplementedError

    def _check_known(self, pool: str) -> None:
        """Raise Unavailable unless the pool's workers were read lately."""
        if not self._is_known(pool):
            raise Unavailable(f"the workers of {pool} were not read lately")

    def _is_known(self, pool: str) -> bool:
        seen_s = self._seen_s.get(pool)
        return seen_s is not None and asyncio.get_running_loop().time() - seen_s <= REPORT_AGE_S

    def _tell(self, failures: Mapping[str, PagemillError]) -> None:
        """Log each failure, once a minute as long as it stays the same."""
        now_s = asyncio.get_running_loop().time()
        self._told_s = {key: at_s for key, at_s in self._told_s.items() if now_s < at_s + TELL_S}
        for pool, error in failures.items():
            if (pool, error.message) not in self._told_s:
                self._told_s[pool, error.message] = now_s
                _log.warning("pool_not_scaled", pool=pool, code=error.code, reason=error.message)
