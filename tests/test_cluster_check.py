"""Parts of `make cluster`, before a door and an engine that are made up."""

import asyncio
import functools
from collections.abc import AsyncIterator

import httpx
import pytest

from ops.cluster.__main__ import start_beside
from ops.cluster.checks import MIXED_ROLES, begun_or_ended
from ops.cluster.compose import CheckFailed, Compose, Container
from ops.cluster.door import Door

CHUNK = 'data: {"choices": [{"delta": {"content": "once"}}]}\n\n'


def respond(request: httpx.Request) -> httpx.Response:
    if b"number 1." in request.content:
        return httpx.Response(503, text="no engine")
    return httpx.Response(200, text=CHUNK + "data: [DONE]\n\n")


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    answering = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(respond))
    monkeypatch.setattr(httpx, "AsyncClient", answering)
    instance = Door(1)
    yield instance
    await instance.close()


async def test_a_streamed_refusal_is_an_error_and_nobody_waits_for_its_answer(door: Door) -> None:
    begun = asyncio.Event()
    answers = asyncio.create_task(door.long_texts(2, 5, begun))
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="answer 1: 503 no engine"):
            await begun_or_ended(begun, answers)
    assert not begun.is_set()


async def test_texts_are_put_together(door: Door) -> None:
    begun = asyncio.Event()
    answers = asyncio.create_task(door.long_texts(1, 5, begun))
    await begun_or_ended(begun, answers)
    assert await answers == ["once"]


class MadeUp(Compose):
    """A project that creates containers with the current image, and keeps them."""

    def __init__(self) -> None:
        super().__init__("test", {"PORT": "1"}, ["compose"])
        self.made: dict[str, list[str]] = {}
        self.recreates = False

    def up(self, **scale: int) -> None:
        for service, count in scale.items():
            images = [] if self.recreates else self.made.get(service, [])
            self.made[service] = [*images, *[self.env["IMAGE"]] * (count - len(images))]

    def wait_healthy(self, timeout_s: float, *services: str) -> float:
        return 0.0

    def containers(self, service: str) -> list[Container]:
        images = self.made[service]
        return [Container(str(n), service, {"Config": {"Image": i}}) for n, i in enumerate(images)]


def test_an_older_image_runs_together_with_the_new_one() -> None:
    compose = MadeUp()
    step = start_beside(compose, "pagemill:old", "pagemill:new")
    assert compose.made == {role: ["pagemill:old", "pagemill:new"] for role in MIXED_ROLES}
    assert step.figures.endswith("of pagemill:new and pagemill:old")
    # Containers that are started later are new.
    assert compose.env["IMAGE"] == "pagemill:new"


def test_an_engine_that_replaces_old_containers_is_reported() -> None:
    compose = MadeUp()
    compose.recreates = True
    with pytest.raises(CheckFailed, match=r"coordinator: containers of \['new', 'new'\]"):
        start_beside(compose, "old", "new")
