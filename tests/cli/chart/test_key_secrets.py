"""The chart's job for keys, with a server that stores Secrets, and a broker that reads them."""

import asyncio
import base64
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
import uvicorn
import yaml
from nats.aio.client import Client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from shared.bus.embedded_server import find_binary, free_port
from shared.config.schema import NatsConfig
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.protocol.permissions import METRICS, OPERATOR
from tests import preloaded
from tests.support.waiting import until
from workers.cli.key_secrets import SecretApi, write_secrets
from workers.roles import all_roles

IDENTITIES = [OPERATOR, METRICS, *(role.name for role in all_roles())]
Secrets = dict[str, dict[str, bytes]]


class Server:
    """The Secrets of an API server, which accepts server-side applies."""

    def __init__(self) -> None:
        self.secrets: Secrets = {}
        self.status = 200

    async def handle(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if self.status != 200:
            return JSONResponse({}, self.status)
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/apply-patch+yaml"
            assert dict(request.query_params) == {"fieldManager": "pagemill", "force": "true"}
            body: dict[str, Any] = await request.json()
            assert (body["kind"], body["metadata"]["name"]) == ("Secret", name)
            self.secrets[name] = {k: base64.b64decode(v) for k, v in body["data"].items()}
        if name not in self.secrets:
            return JSONResponse({}, 404)
        data = {k: base64.b64encode(v).decode() for k, v in self.secrets[name].items()}
        return JSONResponse({"kind": "Secret", "data": data} if data else {"kind": "Secret"})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    stored = Server()
    route = Route("/api/v1/namespaces/here/secrets/{name}", stored.handle, methods=["GET", "PATCH"])
    config = uvicorn.Config(Starlette(routes=[route]), log_level="error", lifespan="off")
    app = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(app.serve([listener]))
    yield stored, f"http://127.0.0.1:{listener.getsockname()[1]}"
    app.should_exit = True
    await serving


@pytest.fixture
async def api(server: tuple[Server, str], tmp_path: Path) -> AsyncIterator[SecretApi]:
    (tmp_path / "token").write_text("one")
    secret_api = SecretApi(server[1], "here", tmp_path / "token")
    yield secret_api
    await secret_api.close()


async def write(api: SecretApi, *tenants: str) -> list[str]:
    return await write_secrets(api, tenants, NatsConfig(tenant_connections=7))


async def test_each_role_has_its_key_and_a_second_job_changes_nothing(
    server: tuple[Server, str], api: SecretApi
) -> None:
    stored = server[0]
    assert await write(api, "acme") == [*IDENTITIES, "acme"]
    first = {name: dict(files) for name, files in stored.secrets.items()}
    assert first.keys() == {
        *(f"pagemill-key-{name}" for name in IDENTITIES),
        "pagemill-keys",
        "pagemill-accounts",
        "pagemill-tenants",
    }
    for name in IDENTITIES:
        assert first[f"pagemill-key-{name}"].keys() == {f"{name}.nk"}
    accounts = first["pagemill-accounts"]
    assert accounts["nats_password"] == first["pagemill-keys"]["nats_password"]
    assert b"max_connections: 7" in accounts["accounts.conf"]
    assert await write(api, "acme") == []
    assert stored.secrets == first


async def test_a_removed_key_is_made_again_and_a_tenant_leaves(
    server: tuple[Server, str], api: SecretApi
) -> None:
    stored = server[0]
    await write(api, "acme")
    before = stored.secrets["pagemill-key-engine"]
    gateway = stored.secrets["pagemill-key-gateway"]
    del stored.secrets["pagemill-keys"]["engine.nk"]
    assert await write(api) == ["engine"]
    assert stored.secrets["pagemill-key-engine"] != before
    assert stored.secrets["pagemill-key-gateway"] == gateway
    assert stored.secrets["pagemill-tenants"] == {}
    assert b"@acme" not in stored.secrets["pagemill-accounts"]["accounts.conf"]
    assert "tenant.acme.nk" not in stored.secrets["pagemill-keys"]


async def test_what_the_job_lacks_is_named(server: tuple[Server, str], api: SecretApi) -> None:
    with pytest.raises(InvalidRequest, match="tenant 'a b' must be 1 to 128"):
        await write(api, "a b")
    server[0].status = 403
    with pytest.raises(ConfigError, match=r"get secrets 'pagemill-keys'.*Role `pagemill-keys`"):
        await write(api)
    server[0].status = 500
    with pytest.raises(Unavailable, match="HTTP status 500"):
        await write(api)


def test_the_job_needs_a_pod() -> None:
    done = preloaded.run("keys", "secrets", "--tenant", "acme")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "keys secrets: kubernetes needs a pod with a service account" in message


async def ignore(_: Exception) -> None:
    """Report nothing: a refused connection is an answer here."""


class Mounts:
    """Folders with the files that a pod of the brokers has."""

    def __init__(self, folder: Path, secrets: Secrets) -> None:
        self.folder, self._secrets = folder, secrets
        self.port = free_port()

    def write_config(self, files: dict[str, str]) -> None:
        """Write the ConfigMap, with paths and ports of this test."""
        changes = {
            ":8222": f":{free_port()}",
            "port: 6222": f"port: {free_port()}",
            "0.0.0.0": "127.0.0.1",
            "../../run/secrets/keys": "../keys",
            "/run/secrets/keys": f"{self.folder}/keys",
            "/etc/nats/": f"{self.folder}/nats/",
            "nats-server -c": f"{find_binary()} -c",
            "sleep 5": "sleep 0.1",
        }
        (self.folder / "nats").mkdir()
        for name, text in files.items():
            for old, new in changes.items():
                text = text.replace(old, new)
            (self.folder / "nats" / name).write_text(text)

    def write_accounts(self) -> None:
        (self.folder / "keys").mkdir(exist_ok=True)
        for name, data in self._secrets["pagemill-accounts"].items():
            (self.folder / "keys" / name).write_bytes(data)

    def start(self) -> subprocess.Popen[bytes]:
        env = {
            "NATS_NAME": "nats-0",
            "NATS_PORT": str(self.port),
            "NATS_STORE_DIR": f'"{self.folder}/store"',
        }
        with (self.folder / "log").open("wb") as log:
            command = ["sh", str(self.folder / "nats" / "run.sh")]
            return subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)

    async def accepts(self, key: bytes) -> bool:
        """Return whether the broker accepts a key."""
        (self.folder / "key.nk").write_bytes(key)
        url, client = f"nats://127.0.0.1:{self.port}", Client()
        file = str(self.folder / "key.nk")
        try:
            await client.connect(url, nkeys_seed=file, allow_reconnect=False, error_cb=ignore)
        except (OSError, nats.errors.Error):
            return False
        finally:
            await client.close()
        return True


async def test_a_broker_reads_changed_accounts_and_ends_when_asked(
    server: tuple[Server, str], api: SecretApi, tmp_path: Path
) -> None:
    (tmp_path / "pagemill.yaml").write_text(
        "models: {demo: {path: /opt/pagemill/demo_model}}\ngateway: {allow_anonymous: true}\n"
    )
    done = preloaded.run("manifests", cwd=tmp_path)
    (files,) = [
        manifest["data"]
        for manifest in yaml.safe_load_all(done.stdout)
        if (manifest["kind"], manifest["metadata"]["name"]) == ("ConfigMap", "nats")
    ]
    secrets = server[0].secrets
    mounts = Mounts(tmp_path, secrets)
    await write(api, "acme")
    acme = secrets["pagemill-tenants"]["acme.nk"]
    await write(api)
    mounts.write_config(files)
    mounts.write_accounts()
    broker = mounts.start()
    try:
        await until(lambda: mounts.accepts(secrets["pagemill-key-engine"]["engine.nk"]))
        assert not await mounts.accepts(acme)
        await write(api, "acme")
        mounts.write_accounts()
        await until(lambda: mounts.accepts(secrets["pagemill-tenants"]["acme.nk"]))
        broker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(broker.wait, 60) == 0
        assert b"lame duck" in (tmp_path / "log").read_bytes().lower()
    finally:
        broker.kill()
        broker.wait()
