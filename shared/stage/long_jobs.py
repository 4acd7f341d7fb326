"""Jobs that last for minutes to days, and stay in their queue until they have ended.

Their progress is in a log, so a worker may be killed at any moment, and the next one continues.
"""

import asyncio
import random

from msgspec.structs import replace

from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S

# Time until another worker gets the jobs of a killed one. `delivery.ack_wait_s` may shorten it.
ACK_WAIT_S = 5.0


class LongJobs:
    """Attempts at the long jobs of one worker."""

    def __init__(self, context: Context, max_deaths: int) -> None:
        """`max_deaths` is the number of workers that may die with a job without any progress."""
        delivery = context.config.delivery
        # Deaths are unfinished attempts as well. Attempts that fail are limited by `Stage.fail`.
        max_deliver = max(delivery.max_deliver, max_deaths)
        self._policy = replace(delivery, max_deaths=max_deaths, max_deliver=max_deliver)
        self._claims = context.stage.claims
        self.ack_wait_s = min(ACK_WAIT_S, delivery.ack_wait_s)

    async def may_begin(self, job: Job, progress: int) -> bool:
        """Record this attempt. Raises Poisoned for a job that has ended too many workers.

        `progress` is a number that grows with the log of the job. Return False, with the job back
        in its queue, if an earlier worker may still be alive.
        """
        if job.delivery.attempt > 1 and not await self._claims.load_history(
            job, progress, self._policy
        ):
            self._claims.release(job)
            await job.delivery.retry(SUSPECT_PAUSE_S * (1 + random.random()))
            return False
        await self._claims.record_attempt(job, progress)
        return True

    async def keep(self, job: Job) -> None:
        """Keep the job while this process lives. A hanging event loop loses it."""
        while True:
            await asyncio.sleep(self.ack_wait_s / 3)
            await job.delivery.progress()
