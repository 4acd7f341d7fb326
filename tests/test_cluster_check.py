"""Parts of `make cluster`, before a door and an engine that are made up."""

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from ops.cluster import upgrade as upgrading
from ops.cluster.checks import begun_or_ended
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
    """A cluster of containers in memory, whose image of the name `broken` does not start."""

    def __init__(self, image: str, **services: list[str]) -> None:
        super().__init__({"IMAGE": image}, ["compose"])
        self.events: list[str] = []
        self.made: dict[str, Container] = {}
        self.num_made = Counter[str]()
        self.config = {
            "services": {
                name.replace("_", "-"): {"image": image} for name in ("secrets", *services)
            }
        }
        self.config["services"]["gpu"] = {
            "image": image,
            "deploy": {"resources": {"reservations": {"devices": [{"driver": "nvidia"}]}}},
        }
        for name, images in services.items():
            for old in images:
                self.make(name.replace("_", "-"), old, "running")

    def make(self, service: str, image: str, status: str) -> None:
        self.num_made[service] += 1
        number = self.num_made[service]
        state = {"Status": status, "Running": True, "Health": {"Status": "healthy"}}
        description = {
            "Name": f"{service}-{number}",
            "Image": image,
            "Config": {"Image": image, "Labels": {upgrading.HASH_LABEL: image}},
            "State": state,
            "RestartCount": upgrading.MAX_RESTARTS,
        }
        self.made[f"{service}-{number}"] = Container(f"{service}-{number}", service, description)

    def hashes(self) -> str:
        return "\n".join(f"{name} {self.env['IMAGE']}" for name in self.config["services"])

    def containers(self, service: str) -> list[Container]:
        return [container for container in self.made.values() if container.service == service]

    def command(self, *arguments: str) -> str:
        if "--no-start" in arguments:
            self.make(arguments[-1], self.env["IMAGE"], "created")
        elif arguments[-1] == "secrets":
            self.make("secrets", self.env["IMAGE"], "exited")
        return ""

    def inside(self, service: str, *_: str) -> str:
        self.events.append(f"current {service}")
        return ""

    def docker(self, command: list[str]) -> str:
        verb, name = command[1], command[-1]
        if verb != "wait":
            self.events.append(f"{verb} {name}")
        state = self.made[name].description["State"]
        if verb == "start":
            has_started = self.made[name].description["Image"] != "broken"
            state |= {"Status": "running" if has_started else "exited", "Running": has_started}
        if verb == "rm":
            del self.made[name]
        return "0"


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> Callable[[MadeUp, dict[str, int]], list[str]]:
    def upgrade(compose: MadeUp, counts: dict[str, int]) -> list[str]:
        monkeypatch.setattr(upgrading, "image_id", lambda name: name)
        monkeypatch.setattr(upgrading, "run", compose.docker)
        upgrading.Upgrade(compose, counts).run()
        return compose.events

    return upgrade


Upgraded = Callable[[MadeUp, dict[str, int]], list[str]]


def test_brokers_are_replaced_first_and_a_worker_starts_before_another_one_stops(
    upgraded: Upgraded,
) -> None:
    compose = MadeUp("new", gateway=["old"], gpu=["old"], engine=["old", "new"], nats_0=["old"])
    events = upgraded(compose, {"gateway": 1, "gpu": 1, "engine": 2, "nats-0": 1})
    assert [" ".join(events[n : n + 3]) for n in range(0, len(events), 3)] == [
        "stop nats-0-1 start nats-0-2 rm nats-0-1",
        "current nats-0 start engine-3 stop engine-1",
        # A worker that needs a device stops first.
        "rm engine-1 stop gpu-1 start gpu-2",
        "rm gpu-1 start gateway-2 stop gateway-1",
        "rm gateway-1",
    ]


def test_an_upgrade_uses_the_container_that_an_interrupted_one_has_made(
    upgraded: Upgraded,
) -> None:
    compose = MadeUp("new", engine=["old", "old", "new"])
    compose.made["engine-3"].description["State"]["Running"] = False
    events = upgraded(compose, {"engine": 2})
    assert events[:3] == ["start engine-3", "stop engine-1", "rm engine-1"]
    assert [c.image for c in compose.containers("engine")] == ["new", "new"]
    with pytest.raises(CheckFailed, match="has lost talker since"):
        upgraded(compose, {"engine": 2, "talker": 1})


@pytest.mark.parametrize("service", ["engine", "nats-0"])
def test_a_container_whose_successor_does_not_start_continues(
    service: str, upgraded: Upgraded
) -> None:
    compose = MadeUp("broken", **{service.replace("-", "_"): ["old"]})
    with pytest.raises(CheckFailed, match=f"{service}-2 ends at its start"):
        upgraded(compose, {service: 1})
    assert compose.events[-2:] == [f"rm {service}-2", f"start {service}-1"]
    assert [c.name for c in compose.containers(service)] == [f"{service}-1"]


def test_an_upgrade_of_an_unhealthy_cluster_changes_nothing(upgraded: Upgraded) -> None:
    compose = MadeUp("new", engine=["old"], nats_0=["old"])
    compose.made["engine-1"].description["State"]["Running"] = False
    with pytest.raises(CheckFailed, match="engine-1 is not healthy, so nothing was changed"):
        upgraded(compose, {"engine": 1, "nats-0": 1})
    assert compose.events == []


def test_the_image_is_kept_for_the_next_start() -> None:
    text = "A=1\nIMAGE=old\nB=2\n"
    assert upgrading.set_variable(text, "IMAGE", "new") == "A=1\nIMAGE=new\nB=2\n"
    assert upgrading.set_variable(text, "GPU_IMAGE", "new") == f"{text}GPU_IMAGE=new\n"
