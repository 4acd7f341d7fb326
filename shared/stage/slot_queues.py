"""The queues of a stage's slots, and their owners among the live workers."""

import asyncio
import contextlib
from collections.abc import Iterable
from itertools import product

import structlog

from shared.bus.connection import BROKER_DEADLINE_S, retry_until
from shared.bus.slot_consumer import SlotConsumer, SlotQueue
from shared.config.schema import MAX_SLOTS
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.stage.runtime import HEARTBEAT_S, Context
from shared.stage.slots import owners_of

_log = structlog.get_logger()


def queues_of(stage: str, model: str, lane: str, slots: Iterable[int | None]) -> list[SlotQueue]:
    """Return queues of a stage; the slot None has the tasks without a slot."""
    return [
        SlotQueue(
            slot,
            subjects.stage_consumer(stage, model, lane, slot),
            subjects.stage_filter(stage, model, lane, slot),
        )
        for slot in slots
    ]


async def find_slots(context: Context, model: str) -> list[int]:
    """Return the slots that a worker pulls from: the configured ones, and others in the broker.

    During a change of the number of slots, the broker has queues that the configuration of this
    worker lacks. Tasks in these queues must be served as well. Raises Unavailable.
    """
    stage, pipeline = context.stage.name, context.pipelines.get(model)
    num_slots = 1 if pipeline is None else pipeline.slots_of(stage)
    depths = await retry_until(
        BROKER_DEADLINE_S,
        lambda: context.bus.figures.depths(subjects.STAGES_STREAM),
        (Unavailable,),
        "the broker did not list the consumers",
    )
    filters = {depth.subject for depth in depths}
    stored = {
        slot
        for slot, lane in product(range(MAX_SLOTS), subjects.LANES)
        if subjects.stage_filter(stage, model, lane, slot) in filters
    }
    return sorted(stored.union(range(num_slots) if num_slots > 1 else ()))


class SlotOwner:
    """Updates the slots that a worker's consumers own, from the heartbeats of all workers."""

    def __init__(self, context: Context, model: str, slots: list[int]) -> None:
        self.consumers: list[SlotConsumer] = []
        self._context = context
        self._model = model
        self._slots = slots
        self._workers: set[str] = set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._look()
            await asyncio.sleep(HEARTBEAT_S)

    async def _look(self) -> None:
        stage, own = self._context.stage.name, self._context.worker
        beats = await self._context.bus.heartbeats.read()
        workers = {
            beat.worker
            for beat in beats
            if (beat.stage or beat.role) == stage and self._model in beat.models
        }
        # A worker pulls before its first heartbeat, and the broker may have lost heartbeats.
        workers.add(own)
        if workers != self._workers:
            self._workers = workers
            owners = owners_of(self._slots, workers)
            slots = {slot for slot, owner in owners.items() if owner == own}
            for consumer in self.consumers:
                consumer.set_owned(slots)
            _log.info("owned_slots", model=self._model, slots=sorted(slots), workers=len(workers))
