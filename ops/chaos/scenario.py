"""One run from its settings to a verdict: start, load, faults, rest, recording, check."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from ops.chaos.broker_contents import Store, shm_entries
from ops.chaos.checks.checker import Verdict, check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import FinalState
from ops.chaos.plan import Settings
from ops.chaos.processes import nemesis
from ops.chaos.processes.brokers import ThreeBrokers
from ops.chaos.processes.pool import LOAD
from ops.chaos.processes.scaled_engines import ScaledEngines
from ops.chaos.watched_deployment import WatchedDeployment
from workers.supervisor.preloader import Preloader

# A run that takes this much longer than its rate requires hangs.
SPARE_S = 300.0


class Scenario(WatchedDeployment):
    """A run in a new folder, which is kept if a check fails."""

    def __init__(self, settings: Settings, preloaders: Mapping[str, Preloader] = {}) -> None:
        super().__init__(settings, "chaos", preloaders=preloaders)
        self.set_load(settings, self.folder)
        scaled = settings.scaled
        self.engines = (
            None if scaled is None else ScaledEngines(self.folder, self.pool, settings, scaled)
        )

    async def run(self) -> RecordedRun:
        """Return the recorded run. Raises TimeoutError if the system does not start or end."""
        shm_before = shm_entries()
        try:
            await self.pool.start()
            final = await self._run(shm_before)
        finally:
            await self.pool.stop()
        return await asyncio.to_thread(self.record, final)

    async def _run(self, shm_before: list[str]) -> FinalState:
        store = await Store.connect(self.url)
        try:
            await self.warm_up()
            await self.rest(store)
            return await self.observe(store, self.settings, shm_before, self._under_load)
        finally:
            await store.close()

    async def rest(self, store: Store) -> bool:
        settled = await super().rest(store)
        if self.engines is not None:
            # The engines of a scaled pool end; the checks report those that stay.
            await self.engines.wait_for_none()
        return settled

    async def _under_load(self) -> None:
        is_rolling = self.settings.rolling_rounds > 0
        await self.run_load(self.settings, SPARE_S, self._faults(), all_faults=is_rolling)

    async def _faults(self) -> None:
        s = self.settings
        if self.engines is not None:
            await self.engines.disturb()
        elif s.rolling_rounds:
            await self._roll(s.rolling_rounds)
        elif isinstance(self.brokers, ThreeBrokers):
            await nemesis.kill_leaders(s.fault_every_s, self.brokers.cluster, self.journal)
        elif s.fault_every_s:
            weights = s.faults or nemesis.KILLS
            longest_s = s.requests / s.rate + SPARE_S
            schedule = nemesis.make_schedule(s.seed, s.fault_every_s, longest_s, weights)
            await nemesis.carry_out(schedule, self.pool)

    async def _roll(self, rounds: int) -> None:
        """Drain and replace every worker in turn, for a number of rounds."""
        for _ in range(rounds):
            for slot in self.pool.slots:
                if slot.role != LOAD:
                    await self.pool.restart(slot)


async def run_scenario(
    settings: Settings, preloaders: Mapping[str, Preloader] = {}
) -> tuple[Verdict, Path]:
    """Run and check; return the verdict and the folder, which is removed after a clean run.

    `preloaders` are passed to `Pool`, and end with the run.
    """
    scenario = Scenario(settings, preloaders)
    try:
        verdict = check(await scenario.run())
    finally:
        for preloader in set(preloaders.values()):
            preloader.close()
    if verdict.clean:
        scenario.remove()
    return verdict, scenario.folder
