"""A broker that runs alone loses the tasks with its process, and the requests are answered."""

import asyncio
import os
import signal

import pytest

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol import subjects
from shared.protocol.records import Finish, LogRecord
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, TextPart
from tests.cluster.conftest import Cluster, living, stopped
from tests.cluster.processes import until_nothing_is_left
from tests.cluster.streams import assert_gapless, text_of
from tests.support.media import data_url
from tests.support.waiting import until


def kill_broker(cluster: Cluster) -> None:
    """Kill the broker, which is started again."""
    pid_file = cluster.config.parent / "data" / "nats" / "nats-server.pid"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("role", ["renderer", "engine"])
async def test_tasks_that_wait_for_a_worker_are_made_again(
    cluster: Cluster, client: Bus, role: str
) -> None:
    """The engine's task names pixels in the memory of the renderer, which are free at the end."""
    image = ImagePart(ImageURL(data_url((IMAGES / "red.png").read_bytes())))
    message = Message("user", [image, TextPart("What color is this image?")])
    request, request_id = GenerateRequest("demo", [message]), new_request_id()

    async def answer() -> list[LogRecord]:
        return [record async for record in ask(client, request, request_id)]

    subject = subjects.stage(role, "demo", "interactive", request_id)
    pid = await cluster.pid(client, role)
    with stopped(pid):
        answering = asyncio.create_task(answer())
        await until(lambda: client.read_last(subjects.STAGES_STREAM, subject))
        kill_broker(cluster)
        # The restored message is not the lost message.
        await until(lambda: client.read_last(subjects.STAGES_STREAM, subject))
    records = await answering
    assert_gapless(records)
    assert isinstance(records[-1], Finish)
    assert "red" in text_of(records).lower()
    await until_nothing_is_left(client)

    async def nothing_is_pinned() -> bool:
        loads = [beat.load for beat in await living(client, "renderer")]
        return bool(loads) and all(load["arena_pinned"] == 0 for load in loads)

    await until(nothing_is_pinned)
