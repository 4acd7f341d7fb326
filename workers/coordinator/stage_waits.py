"""Back-pressure of stages: a request is refused while tasks wait too long in one of its stages."""

import time
from collections.abc import Iterable

from shared.bus.bus import Bus
from shared.errors import NotFound, StageBusy
from shared.protocol import subjects
from shared.protocol.pipeline import StageSpec

READ_S = 1.0
"""Requests within this time share one reading of a queue."""


class StageWaits:
    """Ages of the oldest waiting tasks, by queue of a stage."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ages: dict[str, tuple[float, float]] = {}
        """Time of the last reading and age in seconds, by consumer."""

    async def check(self, model: str, stages: Iterable[StageSpec], lane: str) -> None:
        """Raise StageBusy if a task has waited in a stage for longer than its `max_wait_s`."""
        for stage in stages:
            age_s = await self._age_s(subjects.stage_consumer(stage.name, model, lane))
            if age_s > stage.max_wait_s:
                raise StageBusy(
                    f"outputs: a task has waited for stage {stage.name} for {age_s:.1f} s, the"
                    f" limit is {stage.max_wait_s:g} s (models.{model}.stages.{stage.name}"
                    ".max_wait_s)",
                    field="outputs",
                )

    async def _age_s(self, consumer: str) -> float:
        read_s, age_s = self._ages.get(consumer, (float("-inf"), 0.0))
        if time.monotonic() - read_s >= READ_S:
            age_s = await self._read_age_s(consumer)
            self._ages[consumer] = time.monotonic(), age_s
        return age_s

    async def _read_age_s(self, consumer: str) -> float:
        try:
            depth = await self._bus.figures.depth(subjects.STAGES_STREAM, consumer)
        except NotFound:
            return 0.0
        oldest_ms = await self._bus.figures.oldest_pending_ms(subjects.STAGES_STREAM, depth)
        return 0.0 if oldest_ms is None else (self._bus.now_ms() - oldest_ms) / 1000
