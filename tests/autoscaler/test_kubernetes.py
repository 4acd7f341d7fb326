"""The actuator for Kubernetes, against an API server that has Deployments and their sizes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.config.parsing import parse_config
from shared.errors import ConfigError, Unavailable
from shared.protocol.messages import Heartbeat, PoolReport, WorkerSlot
from workers.autoscaler.kubernetes_api import Scale, ScaleApi
from workers.autoscaler.kubernetes_pools import MAX_SLOTS, KubernetesPools
from workers.autoscaler.presence import Presence
from workers.pools import Pools, pools_of

CONFIG = """
models: {a: {path: a, tower: encoder}}
scale: {pools: [{role: engine, max: 4}, {role: encoder, max: 2}]}
"""
TOKEN = "one"


class ApiServer:
    """The scale subresource of an API server, with optimistic locking as there."""

    def __init__(self) -> None:
        self.sizes = {"engine-a": 0, "encoder-a": 0}
        self.pods = dict(self.sizes)
        self.version = 100
        self.answer: Response | None = None
        self.tokens = {TOKEN}
        self.patched: list[dict[str, Any]] = []
        self.costs: dict[str, str] = {}
        """Deletion cost of each pod, empty if it has none."""
        self.forbidden = ("", "")
        """Method and Deployment that the service account has no right to."""

    async def handle(self, request: Request) -> Response:
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            return Response(status_code=401)
        if self.answer is not None:
            return self.answer
        name = request.path_params["name"]
        if (request.method, name) == self.forbidden:
            return JSONResponse({"kind": "Status", "code": 403}, 403)
        if name not in self.sizes or request.path_params["namespace"] != "here":
            return JSONResponse({"kind": "Status", "code": 404}, 404)
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            patch = await request.json()
            self.patched.append(patch)
            if patch["metadata"]["resourceVersion"] != str(self.version):
                return JSONResponse({"kind": "Status", "code": 409}, 409)
            self.sizes[name] = patch["spec"]["replicas"]
            self.version += 1
        return JSONResponse(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": name, "resourceVersion": str(self.version)},
                # The API server leaves out a size of zero.
                "spec": {"replicas": self.sizes[name]} if self.sizes[name] else {},
                "status": {"replicas": self.pods[name], "selector": "app=a"},
            }
        )

    async def list_pods(self, request: Request) -> Response:
        if self.forbidden == ("LIST", "pods"):
            return JSONResponse({"kind": "Status", "code": 403}, 403)
        assert request.query_params["labelSelector"] == "app=a"
        items = [{"metadata": {"name": name}} for name in self.costs]
        return JSONResponse({"kind": "PodList", "items": items})

    async def patch_pod(self, request: Request) -> Response:
        annotations = (await request.json())["metadata"]["annotations"]
        name = "controller.kubernetes.io/pod-deletion-cost"
        self.costs[request.path_params["name"]] = annotations[name]
        return JSONResponse({"kind": "Pod"})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        path = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        pods = "/api/v1/namespaces/here/pods"
        routes = [
            Route(path, self.handle, methods=["GET", "PATCH"]),
            Route(pods, self.list_pods),
            Route(f"{pods}/{{name}}", self.patch_pod, methods=["PATCH"]),
        ]
        app = Starlette(routes=routes)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


@pytest.fixture
async def server() -> AsyncIterator[tuple[ApiServer, str]]:
    api_server = ApiServer()
    async with api_server.serve() as url:
        yield api_server, url


@pytest.fixture
async def api(server: tuple[ApiServer, str], tmp_path: Path) -> AsyncIterator[ScaleApi]:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    scale_api = ScaleApi(server[1], "here", token)
    yield scale_api
    await scale_api.close()


def pools() -> Pools:
    return pools_of(parse_config(CONFIG, {}, "test"))


async def no_heartbeats() -> list[Heartbeat]:
    return []


async def shrink(
    api: ScaleApi, there: ApiServer, read: Callable[[], Awaitable[list[Heartbeat]]]
) -> None:
    there.sizes["engine-a"] = there.pods["engine-a"] = 3
    there.costs = dict.fromkeys(("engine-a-x", "engine-a-y", "engine-a-z"), "")
    actuator = KubernetesPools(api, pools(), read)
    await actuator.read()
    actuator.wanted("engine/a", 1)
    await actuator.read()
    assert there.sizes["engine-a"] == 1


async def test_the_least_loaded_pods_end_first(
    api: ScaleApi, server: tuple[ApiServer, str]
) -> None:
    async def heartbeats() -> list[Heartbeat]:
        loads = {"engine-a-x": {"held": 7.0}, "engine-a-y": {"held": 1.0, "arena_pinned": 2.0}}
        return [
            Heartbeat("engine", name, "1", 1, ["a"], load, hostname=name)
            for name, load in loads.items()
        ]

    await shrink(api, server[0], heartbeats)
    assert server[0].costs == {"engine-a-x": "7", "engine-a-y": "1000001", "engine-a-z": "0"}


async def test_a_pool_shrinks_also_without_the_right_to_choose_pods(
    api: ScaleApi, server: tuple[ApiServer, str]
) -> None:
    server[0].forbidden = ("LIST", "pods")
    with structlog.testing.capture_logs() as lines:
        await shrink(api, server[0], no_heartbeats)
    (line,) = (line for line in lines if line["event"] == "pods_not_chosen")
    assert "list pods in namespace 'here': the service account has no such right" in line["reason"]


def slots(actuator: KubernetesPools, pool: str) -> list[tuple[int, bool]]:
    return [(slot.slot % MAX_SLOTS, slot.draining) for slot in actuator.running(pool)]


async def test_sizes_are_read_and_set(api: ScaleApi, server: tuple[ApiServer, str]) -> None:
    there, actuator = server[0], KubernetesPools(api, pools(), no_heartbeats)
    await actuator.read()
    assert actuator.pools() == ["engine/a", "encoder/a"]
    assert slots(actuator, "engine/a") == []
    assert actuator.wanted("engine/a", 3)
    assert not actuator.wanted("engine/a", 3)
    await actuator.read()
    assert there.sizes == {"engine-a": 3, "encoder-a": 0}
    # Pods that are not there yet are workers that start.
    assert slots(actuator, "engine/a") == [(0, False), (1, False), (2, False)]
    there.pods["engine-a"] = 3
    assert actuator.wanted("engine/a", 1)
    await actuator.read()
    assert slots(actuator, "engine/a") == [(0, False), (1, True), (2, True)]
    numbers = {slot.slot for pool in actuator.pools() for slot in actuator.running(pool)}
    assert len(numbers) == 3
    assert len(there.patched) == 2


async def test_a_size_that_was_set_is_not_set_again_after_another_has_changed_it(
    api: ScaleApi, server: tuple[ApiServer, str]
) -> None:
    """This actuator may have lost the broker, and another one acts."""
    there, actuator = server[0], KubernetesPools(api, pools(), no_heartbeats)
    await actuator.read()
    actuator.wanted("engine/a", 3)
    await actuator.read()
    there.sizes["engine-a"] = 1
    await actuator.read()
    assert there.sizes["engine-a"] == 1
    assert actuator.wanted("engine/a", 3)


async def test_a_size_that_has_changed_meanwhile_is_read_first(
    api: ScaleApi, server: tuple[ApiServer, str]
) -> None:
    scale = await api.get("engine-a")
    server[0].version += 1
    assert await api.set("engine-a", scale, 4) is None
    assert server[0].sizes["engine-a"] == 0
    newer = await api.get("engine-a")
    changed = await api.set("engine-a", newer, 4)
    assert changed is not None
    assert changed.wanted == 4


async def test_a_size_that_another_client_has_changed_is_not_logged_as_changed(
    api: ScaleApi, server: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, actuator = server[0], KubernetesPools(api, pools(), no_heartbeats)
    await actuator.read()
    get = api.get

    async def get_before_a_change(name: str) -> Scale:
        scale = await get(name)
        there.version += 1
        return scale

    monkeypatch.setattr(api, "get", get_before_a_change)
    actuator.wanted("engine/a", 3)
    with structlog.testing.capture_logs() as lines:
        assert await actuator.read() == {}
    assert lines == []
    assert there.sizes["engine-a"] == 0


async def test_a_token_that_was_replaced_is_read_again(
    api: ScaleApi, server: tuple[ApiServer, str], tmp_path: Path
) -> None:
    server[0].tokens = {"two"}
    with pytest.raises(ConfigError, match="does not accept the token"):
        await api.get("engine-a")
    (tmp_path / "token").write_text("two")
    assert (await api.get("engine-a")).present == 0
    (tmp_path / "token").unlink()
    with pytest.raises(Unavailable, match="the token of the service account cannot be read"):
        await api.get("engine-a")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            Response(status_code=403),
            ConfigError,
            "scale.actuator: get deployments/scale 'engine-a' in namespace 'here': the"
            " service account has no such right: it needs the Role of the chart with"
            " `scaling: pagemill`",
        ),
        (Response(status_code=404), Unavailable, "there is no such Deployment"),
        (Response(status_code=500), Unavailable, "HTTP status 500"),
        (Response("<html>"), Unavailable, "no Scale in the answer"),
        (Response('{"metadata": {"resourceVersion": "1"}}'), Unavailable, "no Scale in the answer"),
        (
            Response(
                '{"metadata": {"resourceVersion": "1"}, "spec": {"replicas": -1}, "status": {}}'
            ),
            Unavailable,
            "no Scale in the answer",
        ),
    ],
)
async def test_answers_that_are_no_sizes(
    api: ScaleApi,
    server: tuple[ApiServer, str],
    answer: Response,
    kind: type[Exception],
    message: str,
) -> None:
    server[0].answer = answer
    with pytest.raises(kind) as raised:
        await api.get("engine-a")
    assert message in str(raised.value)


async def test_nothing_is_reported_while_the_sizes_are_not_known(
    api: ScaleApi, server: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actuator = KubernetesPools(api, pools(), no_heartbeats)
    with pytest.raises(Unavailable):
        actuator.running("engine/a")
    await actuator.read()
    assert actuator.running("engine/a") == []
    monkeypatch.setattr("workers.autoscaler.kubernetes_pools.REPORT_AGE_S", 0.0)
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        actuator.running("engine/a")


async def test_a_missing_deployment_concerns_its_own_pool_and_is_logged_once_a_minute(
    api: ScaleApi, server: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, actuator = server[0], KubernetesPools(api, pools(), no_heartbeats)
    del there.sizes["engine-a"]
    with structlog.testing.capture_logs() as lines:
        await actuator.check()
        assert actuator.pools() == ["encoder/a"]
        with pytest.raises(Unavailable, match="the workers of engine/a were not read lately"):
            actuator.running("engine/a")
        actuator.wanted("encoder/a", 2)
        actuator.log_failures(await actuator.read())
        assert there.sizes["encoder-a"] == 2
        (line,) = [line for line in lines if line["log_level"] == "warning"]
        assert line["pool"] == "engine/a"
        assert "'engine-a' in namespace 'here': there is no such Deployment" in line["reason"]
        monkeypatch.setattr("workers.autoscaler.kubernetes_pools.REPEAT_S", 0.0)
        actuator.log_failures(await actuator.read())
        assert lines[-1] == line
    there.sizes["engine-a"] = 0
    there.pods["engine-a"] = 0
    assert not await actuator.read()
    assert actuator.pools() == ["engine/a", "encoder/a"]


async def test_a_missing_right_names_the_verb_and_the_pool(
    api: ScaleApi, server: tuple[ApiServer, str]
) -> None:
    there, actuator = server[0], KubernetesPools(api, pools(), no_heartbeats)
    there.forbidden = ("PATCH", "engine-a")
    await actuator.check()
    for pool in actuator.pools():
        actuator.wanted(pool, 1)
    failures = await actuator.read()
    assert there.sizes == {"engine-a": 0, "encoder-a": 1}
    assert failures.keys() == {"engine/a"}
    assert "patch deployments/scale 'engine-a'" in failures["engine/a"].message
    # The size that was read is known, and a plan may change it again.
    assert actuator.running("engine/a") == []
    there.forbidden = ("GET", "encoder-a")
    with pytest.raises(ConfigError, match=r"^pool encoder/a: scale\.actuator: get ") as refused:
        await actuator.check()
    assert refused.value.field == "scale.actuator"


async def test_an_api_server_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    api = ScaleApi("http://127.0.0.1:9", "here", tmp_path / "token")
    with pytest.raises(Unavailable, match="get deployments/scale 'engine-a'"):
        await api.get("engine-a")
    with pytest.raises(Unavailable, match="get deployments/scale 'engine-a'"):
        await KubernetesPools(api, pools(), no_heartbeats).check()
    await api.close()


def test_outside_of_a_cluster_the_error_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^scale\.actuator: kubernetes needs a pod") as raised:
        ScaleApi.in_cluster({}, tmp_path)
    assert raised.value.field == "scale.actuator"


def beat(number: int) -> Heartbeat:
    return Heartbeat(
        role="engine",
        worker=f"engine-{number}",
        version="1",
        pid=7,
        models=["a"],
        load={"held": number},
    )


def test_workers_of_an_actuator_without_processes_are_counted() -> None:
    presence = Presence(pools().by_name["engine/a"])
    report = PoolReport("engine/a", "k", "", [WorkerSlot(n) for n in range(3)])
    workers = presence.look(report, [beat(1), beat(2)], 10.0)
    assert [load.num_in_flight for load in workers.ready] == [1, 2]
    assert workers.starting == {"2": 0.0}
    assert workers.others == ()
    workers = presence.look(report, [beat(1)], 15.0)
    # A pod that has ended is replaced, and starts again.
    assert len(workers.ready) == 1
    assert workers.starting == {"1": 0.0, "2": 5.0}
    workers = presence.look(report, [beat(n) for n in range(5)], 20.0)
    assert len(workers.ready) == 3
    assert workers.others == ()
    assert workers.cold_starts_s == (5.0, 10.0)
