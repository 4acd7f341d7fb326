"""Stages that all workers refuse to serve: pure observation, and the end of waiting requests."""

import asyncio
import os
import secrets
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.heartbeats import Heartbeats
from shared.bus.reading import StoredMessage
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat, StartReport
from shared.protocol.records import Failure
from shared.stage.start_reports import StartReporter
from shared.state.token_log import last_record
from shared.telemetry.metrics import Metrics
from tests.support.waiting import until
from workers.coordinator import refused_stages
from workers.coordinator.refused_stages import PATIENCE_S, Place, Refusal, RefusedStages, observe

MODELS = ["demo", "other"]
ENGINE = Place("engine", "demo")


def refused(worker: str, role: str = "engine", model: str = "demo") -> StartReport:
    return StartReport(role, worker, "1", 7, "refused", model, refused=f"no disk for {worker}")


def ready(role: str = "engine", models: tuple[str, ...] = ("demo",)) -> Heartbeat:
    return Heartbeat(role=role, worker="ready", version="1", pid=8, models=[*models], load={})


looks = st.lists(
    st.tuples(
        st.floats(0.1, 30), st.lists(st.sampled_from("abc"), unique=True, max_size=3), st.booleans()
    ),
    max_size=20,
)


@given(looks)
def test_a_refusal_is_certain_after_two_workers_and_some_time_without_a_ready_one(
    steps: list[tuple[float, list[str], bool]],
) -> None:
    state: dict[Place, Refusal] = {}
    now_s, since = 0.0, dict[str, float]()
    for pause_s, workers, is_ready in steps:
        now_s += pause_s
        beats = [ready()] if is_ready else []
        state = observe(state, beats, [refused(worker) for worker in workers], MODELS, now_s)
        for worker in workers:
            since.setdefault(worker, now_s)
        if is_ready:
            since.clear()
        times = since.values()
        certain = len(times) > 1 and max(times) - min(times) >= PATIENCE_S
        assert (ENGINE in state and state[ENGINE].is_certain) == certain


def test_a_role_that_serves_all_models_refuses_for_all() -> None:
    state: dict[Place, Refusal] = {}
    for n, worker in enumerate("ab"):
        report = refused(worker, "renderer", "")
        state = observe(state, [], [report], MODELS, n * PATIENCE_S)
    assert {place for place, r in state.items() if r.is_certain} == {
        Place("renderer", model) for model in MODELS
    }
    assert state[Place("renderer", "demo")].reason == "no disk for b"
    assert observe(state, [ready("renderer", ("demo", "other"))], [], MODELS, 11.0) == {}


class StoredReports:
    """A bus with the reports of workers alone: each with the seconds since it was stored."""

    def __init__(self, reports: dict[str, tuple[StartReport | Heartbeat, float]]) -> None:
        self._stored = [
            StoredMessage(number, subject, to_json(report), 1e12 - 1000 * age_s)
            for number, (subject, (report, age_s)) in enumerate(reports.items(), 1)
        ]
        self.heartbeats = Heartbeats(self)

    async def read(self, stream: str, subject: str) -> list[StoredMessage]:
        is_any = subject == subjects.WORKERS_FILTER
        return [m for m in self._stored if is_any or m.subject.count(".") == subject.count(".")]

    async def read_last(self, stream: str, subject: str) -> StoredMessage | None:
        raise NotImplementedError

    async def publish_without_id(self, subject: str, data: bytes) -> None:
        raise NotImplementedError


async def test_an_engine_that_is_silent_for_some_seconds_serves_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refused_stages, "PATIENCE_S", 0)
    reports = StoredReports(
        {
            subjects.heartbeat("ready"): (ready(), 12.0),
            subjects.heartbeat("other"): (ready("gateway"), 0.0),
            **{subjects.start_report(worker): (refused(worker), 0.0) for worker in "ab"},
        }
    )
    stages = RefusedStages(cast(Bus, reports), MODELS, Metrics("coordinator", "test"))
    await stages._look()
    assert stages._refusals == {}


async def test_requests_that_wait_end_with_the_reason_and_later_ones_wait(
    own_broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_stages, "PATIENCE_S", 0.5)
    monkeypatch.setattr(refused_stages, "LOOK_S", 0.1)
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    stages = RefusedStages(bus, MODELS, Metrics("coordinator", "test"))
    running = asyncio.create_task(stages.run())

    async def publish(model: str) -> str:
        request_id = f"t-{secrets.token_hex(6)}"
        subject = subjects.stage("engine", model, "interactive", request_id)
        await bus.publish(subject, b"task", request_id)
        return request_id

    async def refuse(worker: str) -> None:
        await StartReporter(bus, "engine", worker, "demo", "", "1").refuse("no weights")
        await until(
            lambda: ENGINE in stages._refusals and worker in stages._refusals[ENGINE].workers
        )

    waiting, other = await publish("demo"), await publish("other")
    await refuse("a")
    await asyncio.sleep(0.6)
    assert await last_record(bus, waiting) is None
    await refuse("b")

    async def told() -> list[Place]:
        """Return the stages of which the coordinator has said, after the end of their requests."""
        reports = await bus.heartbeats.read_refusals()
        return [Place(report.stage, report.model) for report in reports if not report.pid]

    assert await until(told) == [ENGINE]
    end = await last_record(bus, waiting)
    assert isinstance(end, Failure)
    assert end.error.message == "no worker of stage engine serves demo: no weights"
    assert (end.error.code, end.error.field) == ("unavailable", "model")
    assert await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(waiting)) is None
    later = await publish("demo")
    await asyncio.sleep(0.5)
    assert await last_record(bus, later) is None
    assert await last_record(bus, other) is None
    beat = Heartbeat(
        role="engine", worker="c", version="1", pid=os.getpid(), models=["demo"], load={}
    )
    await bus.heartbeats.publish("c", to_json(beat))
    await until(lambda: not stages._refusals)
    running.cancel()
    await bus.close()
