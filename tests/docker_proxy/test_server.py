"""The proxy between a client and an engine: what it does, and what it refuses to do."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config.parsing import parse_config
from shared.errors import ConfigError, NotFound, Unavailable
from tests.docker_proxy.conftest import CONFIG, serve_proxy
from tests.docker_proxy.fake_engine import BUS, DOOR, PROJECT, FakeEngine
from workers.autoscaler.docker_api import ProxyApi
from workers.docker_messages import DockerWorker
from workers.docker_proxy import server
from workers.docker_proxy.engine import Engine
from workers.docker_proxy.project import find_project
from workers.docker_proxy.server import run


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def numbers(api: ProxyApi, service: str = "engine") -> dict[int, bool]:
    """The workers of a service, and whether they drain."""
    return {one.number: one.draining for one in await api.workers(service)}


# -- what it does ---------------------------------------------------------------------------------


async def test_workers_are_listed_with_process_and_address(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(2)
    docker.add(1, state="restarting")
    docker.add(3, state="exited")
    assert await api.workers("engine") == [
        DockerWorker(1, 1001, addresses=["172.18.0.1"]),
        DockerWorker(2, 1002, addresses=["172.18.0.2"]),
    ]
    assert await api.workers("encoder") == []
    assert docker.changes == []


async def test_a_further_worker_is_created_from_the_newest_one(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(3)
    newest = docker.add(1)
    newest["Image"] = "sha256:" + "cd" * 32
    assert [one.number for one in await api.start("engine")] == [1, 2, 3]
    made = next(one for one in docker.containers.values() if one["Name"] == "/shop_engine_2")
    assert made["Image"] == newest["Image"]
    assert made["HostConfig"] == newest["HostConfig"]
    assert made["Config"]["Labels"]["com.docker.compose.container-number"] == "2"
    assert made["Config"]["Hostname"] == made["Id"][:12]
    # From it the next one can be made, when the others are gone.
    for one in [c for c in docker.containers.values() if c is not made]:
        del docker.containers[one["Id"]]
    await api.start("engine")
    assert docker.states() == {"shop_engine_2": "running", "shop_engine_1": "running"}


async def test_a_worker_of_several_networks_is_in_all_of_them_before_it_starts(
    docker: FakeEngine, api: ProxyApi
) -> None:
    networks = docker.add(1)["NetworkSettings"]["Networks"]
    networks["shop_door"] = {"Aliases": ["engine"], "NetworkID": DOOR, "IPAddress": "10.0.0.1"}
    await api.start("engine")
    made = next(one for one in docker.containers.values() if one["Name"] == "/shop_engine_2")
    ids = {end["NetworkID"] for end in made["NetworkSettings"]["Networks"].values()}
    assert ids == {BUS, DOOR}
    assert [change.rpartition("/")[2] for change in docker.changes] == [
        "create",
        "connect",
        "start",
    ]


async def test_a_container_that_cannot_join_its_networks_does_not_stay(
    docker: FakeEngine, api: ProxyApi
) -> None:
    networks = docker.add(1)["NetworkSettings"]["Networks"]
    networks["shop_door"] = {"Aliases": None, "NetworkID": DOOR, "IPAddress": ""}
    docker.refuses = "/connect"
    with pytest.raises(Unavailable, match="status 500 of the Docker engine: no space left"):
        await api.start("engine")
    assert docker.states() == {"shop_engine_1": "running"}


async def test_a_container_that_never_joined_its_networks_is_not_started(
    docker: FakeEngine, api: ProxyApi
) -> None:
    """The proxy died before it had connected the container, which would reach no broker."""
    docker.add(1)
    unfinished = docker.add(2, state="created")
    unfinished["NetworkSettings"]["Networks"] = {}
    await api.start("engine")
    assert docker.states() == {"shop_engine_1": "running", "shop_engine_2": "running"}
    made = next(one for one in docker.containers.values() if one["Name"] == "/shop_engine_2")
    assert made["Id"] != unfinished["Id"]
    assert list(made["NetworkSettings"]["Networks"]) == ["shop_bus"]


async def test_a_worker_drains_and_is_removed(docker: FakeEngine, api: ProxyApi) -> None:
    docker.add(1)
    docker.add(2)
    docker.stops.clear()
    assert {one.number: one.draining for one in await api.stop("engine", 2)} == {1: False, 2: True}
    # Once is enough.
    await api.stop("engine", 2)
    docker.stops.set()
    await until(lambda: docker.states() == {"shop_engine_1": "running"})
    assert [change.split("/")[-1] for change in docker.changes].count("stop") == 1
    assert await numbers(api) == {1: False}


async def test_the_last_container_stays_for_its_definition(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1)
    docker.add(2)
    await api.stop("engine", 1)
    await api.stop("engine", 2)
    await until(lambda: list(docker.states().values()) == ["exited"])
    await asyncio.sleep(0.05)
    (kept,) = docker.states()
    assert await numbers(api) == {}
    await api.start("engine")
    assert docker.states() == {kept: "running"}
    await api.start("engine")
    assert set(docker.states()) == {"shop_engine_1", "shop_engine_2"}


async def test_a_worker_that_drains_is_replaced_while_it_is_there(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1)
    docker.stops.clear()
    await api.stop("engine", 1)
    assert {one.number: one.draining for one in await api.start("engine")} == {1: True, 2: False}
    docker.stops.set()
    await until(lambda: docker.states() == {"shop_engine_2": "running"})


async def test_a_stop_that_fails_is_told_and_may_be_tried_again(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1)
    docker.refuses = "/stop"
    await api.stop("engine", 1)
    await until(lambda: any("/stop" in change for change in docker.changes))
    deadline = time.monotonic() + 30.0
    while await numbers(api) != {1: False}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    docker.refuses = None
    await api.stop("engine", 1)
    await until(lambda: docker.states() == {"shop_engine_1": "exited"})


# -- what it refuses ------------------------------------------------------------------------------


async def test_only_the_pools_services_of_the_own_project_are_touched(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1, project="bank")
    docker.add(2, oneoff="True")
    docker.containers[docker.add(3)["Id"]]["Config"]["Labels"]["com.docker.compose.oneoff"] = "True"
    docker.add(1, service="gateway")
    before = docker.states()
    assert await api.workers("engine") == [DockerWorker(2, 1002, addresses=["172.18.0.2"])]
    docker.containers.pop(next(id for id, one in docker.containers.items() if "_2" in one["Name"]))
    with pytest.raises(Unavailable, match="has no worker 1"):
        await api.stop("engine", 1)
    with pytest.raises(
        Unavailable,
        match=r"project 'shop' has no container of service 'engine' to take the definition from:"
        " `docker compose up --detach engine` creates one",
    ):
        await api.start("engine")
    for service in ("gateway", "bank_engine", ".."):
        with pytest.raises(ConfigError):
            await api.start(service)
    assert docker.changes == []
    assert docker.states().items() <= before.items()


async def test_a_pool_has_no_more_workers_than_its_max(docker: FakeEngine, api: ProxyApi) -> None:
    for number in (1, 2, 3):
        docker.add(number)
    with pytest.raises(
        Unavailable, match=r"pool engine/a has 3 workers, and scale\.pools gives it a max of 3"
    ):
        await api.start("engine")
    assert docker.changes == []


async def test_workers_that_drain_are_not_replaced_without_end(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1, service="encoder")
    docker.stops.clear()
    for number in (1, 2, 3):
        await api.stop("encoder", number)
        await api.start("encoder")
    with pytest.raises(Unavailable, match="1 workers and 3 that drain, together twice its max of"):
        await api.start("encoder")
    assert len(docker.states("encoder")) == 4
    docker.stops.set()
    await until(lambda: len(docker.states("encoder")) == 1)
    await api.start("encoder")


async def test_an_engine_that_ignores_filters_is_not_trusted(
    docker: FakeEngine, api: ProxyApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.add(1, project="bank")
    monkeypatch.setattr("tests.docker_proxy.fake_engine.json.loads", lambda _: {"label": []})
    assert await api.workers("engine") == []


# -- attacks on the connection itself -------------------------------------------------------------

HOST_ROOT = json.dumps({"Image": "evil", "HostConfig": {"Privileged": True, "Binds": ["/:/host"]}})
CREATE = "POST /v1.41/containers/create?name=shop_engine_9 HTTP/1.1\r\nHost: docker\r\n"
START = "POST /services/engine/workers HTTP/1.1\r\nHost: proxy\r\n"
LENGTH = f"Content-Length: {len(HOST_ROOT)}\r\nContent-Type: application/json\r\n"
CHUNK = f"{len(HOST_ROOT):x}\r\n{HOST_ROOT}\r\n0\r\n\r\n"
INNER = f"{CREATE}{LENGTH}\r\n{HOST_ROOT}"
LIST = "GET /services/engine/workers HTTP/1.1\r\nHost: proxy\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        f"{CREATE}{LENGTH}\r\n{HOST_ROOT}",
        f"{CREATE}Transfer-Encoding: chunked\r\n\r\n{CHUNK}",
        f"{START}{LENGTH}\r\n{HOST_ROOT}",
        f"{START}Transfer-Encoding: chunked\r\n\r\n{CHUNK}",
        # What one server takes for a body is a request for another.
        f"{START}Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{INNER}",
        f"{START}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{INNER}",
        f"{START}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{INNER}",
        f"{LIST}Content-Length: {len(INNER)}\r\n\r\n{INNER}",
        f"{START.replace('/services', '/../v1.41/containers/create')}\r\n",
        f"{START.replace('/services', '/%2e%2e/services')}\r\n",
        f"{START.replace('engine/workers', 'engine%2fworkers')}\r\n",
        f"{START.replace('engine', 'engine%00')}\r\n",
        f"{START.replace('/services/engine', 'http://docker/v1.41/containers/create#')}\r\n",
        f"{START.replace(' HTTP', '?HostConfig=privileged HTTP')}\r\n",
        f"{LIST}Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n{INNER}",
        "CONNECT docker:2375 HTTP/1.1\r\nHost: docker\r\n\r\n",
    ],
)
async def test_no_bytes_of_a_client_reach_the_engine(
    docker: FakeEngine, socket: str, sent: str
) -> None:
    docker.add(1)
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(sent.encode())
    async with asyncio.timeout(30):
        answer = await reader.read(4096)
    writer.close()
    assert docker.changes == []
    assert list(docker.states()) == ["shop_engine_1"]
    assert b" 200 " not in answer.split(b"\r\n")[0] or sent.startswith(LIST)


async def test_headers_without_an_end_are_refused(docker: FakeEngine, socket: str) -> None:
    """They would fill the memory of the machine: the proxy has no other limit."""
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(LIST.encode())
    line = f"X-Pad: {'x' * 1000}\r\n".encode()
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):  # the proxy has closed it before all was sent
            for _ in range(100):
                writer.write(line)
                await writer.drain()
                await asyncio.sleep(0.001)
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_connections_have_a_limit(docker: FakeEngine, socket: str, api: ProxyApi) -> None:
    """Each one that asks to start a worker waits for those before it."""
    docker.add(1)
    idle = [await asyncio.open_unix_connection(socket) for _ in range(server.MAX_CONNECTIONS)]
    with pytest.raises(Unavailable, match="status 503"):
        await api.workers("engine")
    for _, writer in idle:
        writer.close()
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Unavailable):
                assert await numbers(api) == {1: False}
                return


# -- its start ------------------------------------------------------------------------------------


async def test_the_own_container_tells_the_project(docker: FakeEngine, tmp_path: Path) -> None:
    engine = Engine(str(tmp_path / "docker.sock"))
    await engine.open()
    own = docker.add(1, service="docker-proxy", project="bank")
    assert await find_project(engine, own["Id"]) == "bank"
    with pytest.raises(ConfigError, match=r"^--project: 'host-7' is no container of a compose"):
        await find_project(engine, "host-7")
    own["Config"]["Labels"] = {}
    with pytest.raises(ConfigError):
        await find_project(engine, own["Id"])
    with pytest.raises(NotFound, match="No such container: host-7"):
        await engine.inspect("host-7")
    await engine.close()


async def test_without_an_engine_the_socket_is_named(tmp_path: Path) -> None:
    config = parse_config(CONFIG, {}, "test")
    with pytest.raises(Unavailable, match=r"no Docker engine answers at /nowhere/docker\.sock"):
        await run(config, "/nowhere/docker.sock", PROJECT)


async def test_a_configuration_that_cannot_be_served(docker: FakeEngine, tmp_path: Path) -> None:
    socket = str(tmp_path / "docker.sock")
    for text, message in (
        ("models: {a: {path: a}}", "scale.pools: the configuration has no pools"),
        (
            "models: {a: {path: a, tower: encoder}}\nscale: {pools: [{role: engine},"
            " {role: encoder, service: engine}]}",
            "scale.pools: engine/a and encoder/a have the same service 'engine'",
        ),
        (
            CONFIG.replace("scale: {", "scale: {docker_proxy: /nowhere/socket, "),
            "scale.docker_proxy: no socket can be opened in the folder /nowhere",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            await run(parse_config(text, {}, "test"), socket, PROJECT)


async def test_a_proxy_that_is_away(tmp_path: Path) -> None:
    api = ProxyApi("/nowhere/proxy.sock")
    with pytest.raises(Unavailable, match=r"no proxy answers at /nowhere/proxy\.sock"):
        await api.workers("engine")
    await api.close()


async def test_another_server_is_no_proxy(docker: FakeEngine, tmp_path: Path) -> None:
    api = ProxyApi(str(tmp_path / "docker.sock"))
    with pytest.raises(Unavailable, match="no answer of `pagemill docker-proxy`"):
        await api._request("GET", "/version")
    await api.close()


async def test_other_users_may_connect(docker: FakeEngine, tmp_path: Path) -> None:
    docker.add(1)
    async with serve_proxy(str(tmp_path / "docker.sock"), str(tmp_path / "p"), PROJECT):
        mode = (tmp_path / "p").stat().st_mode & 0o777
        # The autoscaler is one; only its container has the folder.
        assert mode == 0o666
