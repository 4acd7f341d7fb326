"""A request that is cancelled while it is admitted: each of its outputs has an end, as always."""

import asyncio
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import Cancelled
from shared.protocol import subjects
from shared.protocol.records import OutputEnd
from shared.protocol.requests import GenerateRequest, encode_request
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.state import output_ends
from shared.state.token_log import LogWriter, end_request
from tests.support.waiting import until
from workers import settings
from workers.coordinator.worker import Coordinator

CONFIG = Path(__file__).parents[2] / "ops" / "demo_voice" / "pagemill.yaml"
OUTPUTS = ["codes", "audio"]


@pytest.fixture
def request_id() -> str:
    return f"t-{secrets.token_hex(6)}"


async def cancel(bus: Bus, request_id: str) -> None:
    await end_request(bus, request_id, 1, Cancelled("cancelled"), [])


def coordinator_on(bus: Bus) -> Coordinator:
    config: Config = settings.load_config(CONFIG)
    context = Context("coordinator", "coordinator-1", "", config, bus, structlog.get_logger())
    return Coordinator(context)


async def admit(bus: Bus, request_id: str, coordinator: Coordinator | None = None) -> list[str]:
    """Have a coordinator admit a request for a speech; return how it settles the delivery."""
    settled = []

    async def retry(after_s: float) -> None:
        settled.append("retried")

    async def ack() -> None:
        settled.append("acknowledged")

    request = GenerateRequest("demo", given_text="three red circles", outputs=["audio"])
    delivery: Any = SimpleNamespace(
        subject=subjects.request("demo", request_id),
        data=encode_request(request),
        stored_ms=bus.now_ms(),
        attempt=1,
        sequence=10**9,
        place=subjects.RequestPlace(subjects.REQUESTS_STREAM, 10**9),
        receipt="r",
        tenant="",
        msg_id=request_id,
        headers={},
        retry=retry,
        ack=ack,
        abandon=lambda: None,
    )
    job = Job(delivery, bus.now_ms(), request_id)
    await (coordinator or coordinator_on(bus)).admit_or_end(job)
    return settled


async def ends_of(bus: Bus, request_id: str) -> list[bool]:
    """Whether the end of each output says that it was cut."""
    logs = [await LogWriter.open(bus, request_id, 9, output) for output in OUTPUTS]
    ends = [log.records[-1] for log in logs if log.closed]
    return [end.cut for end in ends if isinstance(end, OutputEnd)]


async def test_outputs_are_cut_although_their_list_was_written_after_it_was_read(
    bus: Bus, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = output_ends.expected

    async def read_too_early(bus: Bus, request_id: str) -> list[str]:
        outputs = await expected(bus, request_id)
        await output_ends.begin(bus, request_id, OUTPUTS)
        return outputs

    monkeypatch.setattr(output_ends, "expected", read_too_early)
    await cancel(bus, request_id)
    assert await ends_of(bus, request_id) == [True, True]


async def test_a_coordinator_closes_the_outputs_of_a_request_that_was_cancelled_before_their_list(
    bus: Bus, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = output_ends.begin

    async def begin_after_cancel(bus: Bus, request_id: str, outputs: list[str]) -> None:
        await cancel(bus, request_id)
        await begin(bus, request_id, outputs)

    monkeypatch.setattr(output_ends, "begin", begin_after_cancel)
    assert await admit(bus, request_id) == ["acknowledged"]
    assert await ends_of(bus, request_id) == [True, True]
    tasks = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    assert tasks is None


async def test_the_next_coordinator_closes_the_outputs_of_one_that_died_after_the_list(
    bus: Bus, request_id: str
) -> None:
    await cancel(bus, request_id)
    await output_ends.begin(bus, request_id, OUTPUTS)
    assert await admit(bus, request_id) == ["acknowledged"]
    assert await ends_of(bus, request_id) == [True, True]


async def test_a_request_in_time_is_admitted(bus: Bus, request_id: str) -> None:
    assert await admit(bus, request_id) == ["retried"]
    assert await output_ends.expected(bus, request_id) == OUTPUTS
    assert await ends_of(bus, request_id) == []


async def test_tasks_that_were_stored_after_a_cancellation_are_removed(
    bus: Bus, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_first = tasks.publish_first

    async def publish_after_cancel(*args: Any) -> None:
        await cancel(bus, request_id)
        await publish_first(*args)

    monkeypatch.setattr(tasks, "publish_first", publish_after_cancel)
    assert await admit(bus, request_id) == ["acknowledged"]
    assert await ends_of(bus, request_id) == [True, True]
    assert await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id)) is None


async def test_a_request_does_not_wait_for_replicas_with_the_end_of_another_with_its_id(
    bus: Bus, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waiting, has_stored = 0, asyncio.Event()

    async def wait_for_replicas(_: Bus) -> None:
        nonlocal num_waiting
        num_waiting += 1
        await has_stored.wait()

    await cancel(bus, request_id)
    monkeypatch.setattr(Bus, "wait_for_replicas", wait_for_replicas)
    coordinator = coordinator_on(bus)
    admitting = [asyncio.create_task(admit(bus, request_id, coordinator)) for _ in range(2)]
    await until(lambda: num_waiting == 2)
    has_stored.set()
    assert await asyncio.gather(*admitting) == [["acknowledged"]] * 2
