"""Urgent work of a coordinator comes first, and other work still proceeds."""

import asyncio

import pytest

from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest, encode_request
from shared.stage.job import Job
from tests.coordinator.test_repeats import start_coordinator
from tests.support.waiting import until
from workers.coordinator import precedence
from workers.coordinator.precedence import Precedence
from workers.coordinator.worker import Coordinator


async def test_other_work_waits_until_all_urgent_work_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precedence, "MAX_WAIT_S", 3600)
    order = Precedence()
    await order.wait()
    with order.urgent():
        with order.urgent():
            waiting = asyncio.create_task(order.wait())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_other_work_proceeds_although_there_is_always_urgent_work() -> None:
    order = Precedence()
    with order.urgent():
        await order.wait()


async def test_an_admission_is_urgent_work(
    own_broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[asyncio.Task[None]] = []
    were_done: list[bool] = []
    admit = Coordinator._admit

    async def admit_beside_another(self: Coordinator, job: Job, request_id: str) -> None:
        others.append(asyncio.create_task(self._precedence.wait()))
        await admit(self, job, request_id)
        were_done.append(others[-1].done())

    monkeypatch.setattr(precedence, "MAX_WAIT_S", 3600)
    monkeypatch.setattr(Coordinator, "_admit", admit_beside_another)
    connection, running = await start_coordinator(own_broker.url)
    request = encode_request(GenerateRequest("demo", prompt="a"))
    await connection.publish_without_id(subjects.request("demo", "r"), request)
    await until(lambda: were_done)
    assert were_done == [False]
    await others[0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await connection.close()
