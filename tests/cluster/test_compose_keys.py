"""Workers that have the files of the compose file's volumes, and nothing else, answer a request."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.cluster.compose import FILE, KEYS
from ops.cluster.door import Door, read_cases
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer, free_port
from shared.bus.login import Login, seed_file
from shared.protocol.permissions import OPERATOR
from tests import preloaded
from tests.cluster.conftest import CONFIG, FORKED_PAGEMILL, ROOT, until_ready

ROLES = ("coordinator", "renderer", "engine", "gateway")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]


class Volumes:
    """Folders in place of the named volumes of the compose file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        text = (FILE.parent / "pagemill.yaml").read_text(encoding="utf-8")
        (folder / "pagemill.yaml").write_text(text.replace("/run/", f"{folder}/"))
        for volume, mount in _mounts(SERVICES["secrets"]).items():
            place = folder / mount.removeprefix("/run/")
            place.parent.mkdir(exist_ok=True)
            (folder / volume).mkdir(exist_ok=True)
            if place != folder / volume:
                place.symlink_to(folder / volume)

    def keys(self, *command: str) -> None:
        """Run the service `secrets`, as `docker compose run --rm secrets COMMAND` does."""
        shell, options, script, name = SERVICES["secrets"]["entrypoint"]
        script = script.replace("$$", "$").replace("/run/", f"{self.folder}/")
        script = script.replace("/etc/pagemill/", f"{self.folder}/")
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        pagemill = bin_folder / "pagemill"
        pagemill.write_text(f'#!/bin/sh\nexec {shlex.join(FORKED_PAGEMILL)} "$@"\n')
        pagemill.chmod(0o755)
        image = (FILE.parent / "Dockerfile").read_text(encoding="utf-8")
        variables = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **dict(re.findall(r"(PAGEMILL_\w+)=(\S+)", image)),
            **SERVICES["secrets"]["environment"],
            "POOL_ROLES": "engine,encoder",
        }
        subprocess.run(
            [shell, options, script, name, *(command or SERVICES["secrets"]["command"])],
            env=os.environ | variables,
            cwd=self.folder,
            check=True,
            capture_output=True,
        )

    def of(self, service: str) -> Path:
        """Return the folder that a service sees as the folder of its keys."""
        (volume,) = [name for name, at in _mounts(SERVICES[service]).items() if at == KEYS]
        return self.folder / volume


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mount points of the named volumes of a service."""
    parts = [mount.split(":") for mount in service["volumes"] if mount[0] not in "$."]
    return {part[0]: part[1] for part in parts}


@pytest.fixture
def volumes(tmp_path: Path) -> Volumes:
    run_volumes = Volumes(tmp_path / "run")
    run_volumes.keys()
    return run_volumes


def files_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_replaced_key_and_a_tenant_reach_the_volumes_that_need_them(volumes: Volumes) -> None:
    before = {role: seed_file(volumes.of(role), role).read_bytes() for role in ROLES}
    accounts = (volumes.of("nats-0") / "accounts.conf").read_text()
    volumes.keys("rotate", "engine")
    volumes.keys("add-tenant", "acme")
    after = {role: seed_file(volumes.of(role), role).read_bytes() for role in ROLES}
    assert [role for role in ROLES if before[role] != after[role]] == ["engine"]
    assert "@acme" not in accounts
    assert "@acme" in (volumes.of("nats-0") / "accounts.conf").read_text()
    for role in ROLES:
        file = seed_file(volumes.of(role), role)
        assert files_of(volumes.of(role)) == [file.name]
        assert file.stat().st_mode & 0o777 == 0o600
    assert files_of(volumes.of("nats-0")) == ["accounts.conf", "nats_password"]
    assert files_of(volumes.folder / "keys-pool") == ["encoder.nk", "engine.nk", "pool.nk"]
    engine = seed_file(volumes.folder / "keys-pool", "engine").read_bytes()
    assert engine == after["engine"]


async def test_workers_with_their_own_key_alone_answer_a_request(
    volumes: Volumes, tmp_path: Path
) -> None:
    (tmp_path / "pagemill.yaml").write_text(CONFIG)
    port = free_port()
    server = EmbeddedServer(tmp_path / "nats", accounts_file=volumes.of("nats-0") / "accounts.conf")
    server.start()
    processes = []
    try:
        for role in ROLES:
            env = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PAGEMILL_NATS__KEYS": str(volumes.of(role)),
                "PAGEMILL_GATEWAY__PORT": str(port),
            }
            config = ["--config", str(tmp_path / "pagemill.yaml"), "--nats", server.url]
            with (tmp_path / "workers.log").open("ab") as log:
                worker = preloaded.start(["worker", role, *config], env=env, stderr=log)
            processes.append(worker)
        operator = Login(server.url, OPERATOR, seed_file(volumes.of(OPERATOR), OPERATOR))
        bus = await Bus.connect(operator, "test")
        try:
            await until_ready(bus, dict.fromkeys(ROLES, ()))
        finally:
            await bus.close()
        door = Door(port)
        try:
            tally = await door.ask_all(read_cases()[:3])
        finally:
            await door.close()
        assert (tally.num_requests, tally.failures) == (3, [])
    finally:
        for worker in processes:
            worker.kill()
            worker.wait()
        server.stop()
