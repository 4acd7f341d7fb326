"""The proxy before a real Docker engine, with containers that compose has made."""

import asyncio
import json
import secrets
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.cluster.compose import NotPossible, check_engine, find_compose, run
from tests.docker_proxy.conftest import serve_proxy
from workers.autoscaler.docker_api import ProxyApi
from workers.cli.commands.docker import DOCKER_SOCKET
from workers.docker_proxy.definition import NUMBER

IMAGE = "pagemill"
WORKER = {
    "image": IMAGE,
    "entrypoint": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"],
    "init": True,
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "restart": "unless-stopped",
    "stop_grace_period": "7s",
    "tmpfs": ["/data", "/tmp"],
    "volumes": ["state:/state:ro", "./file:/file:ro"],
    "environment": {"ONE": "two"},
    "mem_limit": "64m",
    "networks": ["bus", "side"],
}
FILE = {
    "services": {"engine": WORKER, "gateway": WORKER},
    "networks": {"bus": {"internal": True}, "side": {"internal": True}},
    "volumes": {"state": {}},
}


@dataclass
class Running:
    project: str
    compose: list[str]
    api: ProxyApi

    def containers(self, service: str) -> list[dict[str, Any]]:
        """The containers that compose takes for its own, by number."""
        ids = run([*self.compose, "ps", "--all", "--quiet", service]).split()
        found: list[dict[str, Any]] = json.loads(run(["docker", "inspect", *ids]))
        return sorted(found, key=lambda one: int(one["Config"]["Labels"][NUMBER]))

    def states(self, service: str = "engine") -> dict[str, str]:
        found = self.containers(service)
        return {c["Config"]["Labels"][NUMBER]: c["State"]["Status"] for c in found}

    async def until(self, **states: str) -> None:
        wanted = {number.removeprefix("n"): state for number, state in states.items()}
        async with asyncio.timeout(60):
            while self.states() != wanted:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.2)


@pytest.fixture
def words() -> list[str]:
    """The words that run compose."""
    reason = f"needs a Docker engine with the image {IMAGE}"
    try:
        check_engine()
        found = find_compose()
    except NotPossible:
        pytest.skip(reason)
    image = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False)
    if image.returncode != 0:
        pytest.skip(reason)
    return found


@pytest.fixture
async def running(words: list[str], tmp_path: Path) -> AsyncIterator[Running]:
    project = f"pools{secrets.token_hex(3)}"
    (tmp_path / "file").touch()
    (tmp_path / "compose.yml").write_text(yaml.safe_dump(FILE))
    compose = [*words, "--file", str(tmp_path / "compose.yml"), "--project-name", project]
    try:
        run([*compose, "up", "--detach"])
        socket = str(tmp_path / "proxy.sock")
        async with serve_proxy(str(DOCKER_SOCKET), socket, project):
            api = ProxyApi(socket)
            yield Running(project, compose, api)
            await api.close()
    finally:
        run([*compose, "down", "--volumes", "--timeout", "1"])
        label = f"label=com.docker.compose.project={project}"
        assert run(["docker", "ps", "--all", "--quiet", "--filter", label]) == ""


async def test_containers_are_created_as_compose_does_and_drained(running: Running) -> None:
    api = running.api
    assert [one.number for one in await api.workers("engine")] == [1]
    workers = await api.start("engine")
    assert [one.number for one in workers] == [1, 2]
    assert [(bool(one.pid), len(one.addresses)) for one in workers] == [(True, 2)] * 2, workers
    first, second = running.containers("engine")
    assert second["Name"].lstrip("/")[:-1] == first["Name"].lstrip("/")[:-1]
    assert second["HostConfig"] == first["HostConfig"]
    assert second["Image"] == first["Image"]
    assert {m["Destination"] for m in second["Mounts"]} == {"/state", "/file"}
    config, own = (dict(one["Config"]) for one in (first, second))
    assert own.pop("Hostname") == second["Id"][:12]
    assert own.pop("Labels") == config.pop("Labels") | {NUMBER: "2"}
    config |= {"Image": first["Image"]}
    del config["Hostname"]
    assert own == config
    for name, network in second["NetworkSettings"]["Networks"].items():
        assert "engine" in network["Aliases"]
        assert first["Id"][:12] not in network["Aliases"]
        assert network["NetworkID"] == first["NetworkSettings"]["Networks"][name]["NetworkID"]
    # The one that was created is a definition, too.
    await api.stop("engine", 1)
    await running.until(n2="running")
    await api.start("engine")
    await running.until(n1="running", n2="running")
    await api.stop("engine", 1)
    await running.until(n2="running")
    await api.stop("engine", 2)
    await running.until(n2="exited")
    (kept,) = running.containers("engine")
    assert kept["State"]["ExitCode"] == 0
    assert await api.workers("engine") == []
    # Compose's own commands know them, and other services are as they were.
    run([*running.compose, "up", "--detach", "--no-recreate", "--scale", "engine=2", "engine"])
    assert sorted(running.states().values()) == ["running", "running"]
    assert running.states("gateway") == {"1": "running"}
