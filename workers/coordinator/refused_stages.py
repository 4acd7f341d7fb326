"""Stages that no worker can serve, because each one refuses its configuration or its model.

Without this, requests for such a stage would wait for their deadline, and no client would learn
the reason.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import structlog
from msgspec import Struct
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.bus.streams import HEARTBEAT_TTL_S
from shared.errors import PagemillError, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat, StartReport
from shared.protocol.names import encode_model
from shared.stage.runtime import VERSION
from shared.stage.stage import settle
from shared.state.token_log import end_request
from shared.telemetry.metrics import Metrics

LOOK_S = 2.0
# The memory of a GPU, a port or a file may be in use until another process has ended.
PATIENCE_S = 10.0
# A supervisor of another kind may wait for minutes before it starts a worker again.
FORGET_S = 900.0

_log = structlog.get_logger()


class Place(NamedTuple):
    """A stage of a model."""

    stage: str
    model: str


class Refusal(Struct, frozen=True):
    """Refusals of the workers of one stage, without a ready worker in between."""

    reason: str
    """The latest one."""
    workers: tuple[str, ...]
    since_s: float
    latest_s: float

    @property
    def is_certain(self) -> bool:
        return len(self.workers) > 1 and self.latest_s - self.since_s >= PATIENCE_S


def observe(
    before: dict[Place, Refusal],
    beats: Iterable[Heartbeat],
    reports: Iterable[StartReport],
    models: Sequence[str],
    now_s: float,
) -> dict[Place, Refusal]:
    """Return the refusals at a moment, from the reports of all workers. Pure.

    A ready worker ends the refusals of its stages.
    """
    now = {place: r for place, r in before.items() if now_s - r.latest_s < FORGET_S}
    for report in reports:
        for model in [report.model] if report.model else models:
            place = Place(report.stage or report.role, model)
            refusal = now.get(place) or Refusal(report.refused, (), now_s, now_s)
            if report.worker not in refusal.workers:
                now[place] = replace(
                    refusal,
                    reason=report.refused,
                    workers=(*refusal.workers[-7:], report.worker),
                    latest_s=now_s,
                )
    for beat in beats:
        for model in beat.models:
            now.pop(Place(beat.stage or beat.role, model), None)
    return now


class RefusedStages:
    """Ends the requests that wait for a stage that no worker can serve."""

    def __init__(self, bus: Bus, models: Iterable[str], metrics: Metrics) -> None:
        self._bus = bus
        self._models = sorted(models)
        self._refusals: dict[Place, Refusal] = {}
        metrics.set_function("refused_stages", lambda: float(len(self._certain)))

    @property
    def _certain(self) -> dict[Place, Refusal]:
        return {place: r for place, r in self._refusals.items() if r.is_certain}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except PagemillError as error:
                _log.info("refusals_not_read", reason=error.message)

    async def _look(self) -> None:
        before = self._certain
        reports = [r for r in await self._bus.heartbeats.read_refusals() if r.pid]
        # A busy worker, or one on a loaded machine, may be silent for seconds.
        beats = await self._bus.heartbeats.read(HEARTBEAT_TTL_S)
        now_s = asyncio.get_running_loop().time()
        self._refusals = observe(self._refusals, beats, reports, self._models, now_s)
        for place, refusal in self._certain.items():
            if place not in before:
                _log.error("stage_refused", reason=refusal.reason, **place._asdict())
            # A later task may be served by the worker that starts for it.
            latest_ms = self._bus.now_ms() - 1000 * (now_s - refusal.latest_s)
            await self._end_tasks(place, refusal.reason, latest_ms)
            await self._tell(place, refusal.reason)

    async def _tell(self, place: Place, reason: str) -> None:
        """Publish a report that clients, commands and pages show."""
        name = f"{place.stage}_{encode_model(place.model)}"
        report = StartReport(
            place.stage, name, VERSION, 0, "refused", place.model, place.stage, refused=reason
        )
        await self._bus.heartbeats.publish_start(name, to_json(report))

    async def _end_tasks(self, place: Place, reason: str, until_ms: float) -> None:
        """End the requests with a task that the stage got before `until_ms`."""
        message = f"no worker of stage {place.stage} serves {place.model}: {reason}"
        error = Unavailable(message, field="model")
        waiting = self._bus.read_forwards(
            subjects.STAGES_STREAM, subjects.stage_of_model(place.stage, place.model)
        )
        async for task in waiting:
            if task.stored_ms > until_ms:
                break
            await self._end(task, error)

    async def _end(self, task: StoredMessage, error: Unavailable) -> None:
        request_id = subjects.last_token(task.subject)
        await settle(
            self._bus, request_id, partial(end_request, self._bus, request_id, 1, error, [])
        )
        _log.warning("ended_without_worker", request_id=request_id, reason=error.message)
