"""The chart and the clients of the product against a real API server: `make kubernetes`."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from shared.bus.embedded_server import free_port
from shared.config.schema import NatsConfig
from shared.errors import ConfigError
from tests.cli.chart import rendering
from tests.cli.chart.test_chart import MATRIX, Manifest, values_of
from tests.support.waiting import wait_until
from workers.autoscaler.kubernetes_api import ScaleApi
from workers.cli.key_secrets import SecretApi, write_secrets

FOLDER = "KUBEBUILDER_ASSETS"
"""Variable of the environment with a folder that has `etcd` and `kube-apiserver`."""
TOKEN = "administrator"
APPLY = {"Content-Type": "application/apply-patch+yaml"}

pytestmark = pytest.mark.needs_folder(FOLDER)


@dataclass
class Server:
    """A running API server."""

    url: str
    http: httpx.Client
    """Client of the administrator."""

    def path_of(self, manifest: Manifest) -> str | None:
        """Return the path of an object, or None if the server does not know its kind."""
        version, name = manifest["apiVersion"], manifest["metadata"]["name"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found = self.http.get(base)
        if found.status_code == 404:
            return None
        (kind,) = [
            item
            for item in found.raise_for_status().json()["resources"]
            if item["kind"] == manifest["kind"] and "/" not in item["name"]
        ]
        if kind["namespaced"]:
            base += f"/namespaces/{manifest['metadata']['namespace']}"
        return f"{base}/{kind['name']}/{name}"

    def apply(self, manifests: list[Manifest]) -> None:
        """Apply manifests strictly. An answer with a warning fails the test."""
        for manifest in manifests:
            if (path := self.path_of(manifest)) is not None:
                query = "fieldManager=test&fieldValidation=Strict&force=true"
                answer = self.http.patch(f"{path}?{query}", json=manifest, headers=APPLY)
                assert answer.is_success, f"{path}: {answer.text}"
                assert "warning" not in answer.headers, f"{path}: {answer.headers['warning']}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    programs, folder = Path(os.environ[FOLDER]), tmp_path_factory.mktemp("kubernetes")
    key = rsa.generate_private_key(65537, 2048)
    format_ = serialization.PrivateFormat.TraditionalOpenSSL
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, format_, no_password)
    (folder / "accounts.key").write_bytes(pem)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    store, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    port = free_port()
    etcd: dict[str, object] = {
        "data-dir": folder / "etcd",
        "listen-client-urls": store,
        "advertise-client-urls": store,
        "listen-peer-urls": peer,
    }
    api: dict[str, object] = {
        "etcd-servers": store,
        "bind-address": "127.0.0.1",
        "secure-port": port,
        "cert-dir": folder / "certificates",
        "authorization-mode": "RBAC",
        "token-auth-file": folder / "tokens.csv",
        "service-account-issuer": "https://127.0.0.1",
        "service-account-key-file": folder / "accounts.key",
        "service-account-signing-key-file": folder / "accounts.key",
        "service-cluster-ip-range": "10.0.0.0/24",
        "disable-admission-plugins": "ServiceAccount",
    }
    processes = []
    try:
        for program, options in (("etcd", etcd), ("kube-apiserver", api)):
            command = [str(programs / program), *(f"--{name}={v}" for name, v in options.items())]
            with (folder / f"{program}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        url, headers = f"https://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, verify=False, headers=headers) as http:

            def is_ready() -> bool:
                assert all(process.poll() is None for process in processes), folder
                try:
                    return http.get("/readyz").is_success
                except httpx.TransportError:
                    return False

            wait_until(is_ready)
            yield Server(url, http)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def helm() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def rendered(helm: ProcessPoolExecutor, namespace: str, **options: Any) -> list[Manifest]:
    is_install = options.pop("is_install", True)
    values = values_of(**options | {"createNamespace": True})
    text, error = helm.submit(
        rendering.try_render, values, is_install=is_install, namespace=namespace
    ).result()
    assert error == ""
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", MATRIX)
def test_the_api_server_accepts_the_chart_and_its_upgrade(
    name: str, server: Server, helm: ProcessPoolExecutor
) -> None:
    namespace = name.replace(" ", "-")
    for is_install in (True, False):
        server.apply(rendered(helm, namespace, is_install=is_install, **MATRIX[name]))


def account_token(server: Server, namespace: str, account: str, file: Path) -> Path:
    """Write a token of a service account."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    answer = server.http.post(path, json={"spec": {}}).raise_for_status()
    file.write_text(answer.json()["status"]["token"])
    return file


async def test_service_accounts_have_the_rights_that_they_need_and_no_others(
    server: Server, helm: ProcessPoolExecutor, tmp_path: Path
) -> None:
    server.apply(rendered(helm, "rights", scaling="pagemill"))
    token = account_token(server, "rights", "pagemill-keys", tmp_path / "keys")
    secrets = SecretApi(server.url, "rights", token, trust=False)
    token = account_token(server, "rights", "pagemill-autoscaler", tmp_path / "autoscaler")
    sizes = ScaleApi(server.url, "rights", token, trust=False)
    try:
        assert "engine" in await write_secrets(secrets, ["acme"], NatsConfig())
        assert await write_secrets(secrets, ["acme"], NatsConfig()) == []
        assert (await secrets.read("pagemill-key-engine")).keys() == {"engine.nk"}
        scale = await sizes.get("engine-qwen2-vl")
        assert scale.wanted == 0
        changed = await sizes.set("engine-qwen2-vl", scale, 2)
        assert changed is not None
        assert changed.wanted == 2
        assert await sizes.set("engine-qwen2-vl", scale, 3) is None
        with pytest.raises(ConfigError, match="the service account has no such right"):
            await sizes.get("coordinator")
    finally:
        await secrets.close()
        await sizes.close()
