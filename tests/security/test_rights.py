"""Keys of a gateway that are used for more than they are good for."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.bus.embedded_server import EmbeddedServer
from tests.gateway.conftest import Gateway, start_gateway_at
from workers.gateway.http.auth import digest, make_key
from workers.gateway.openapi.document import OPERATIONS

KEYS = {name: make_key() for name in ("requests", "metrics", "both", "neither")}
RIGHTS = {"metrics": ["metrics"], "both": ["metrics", "requests"], "neither": []}


@pytest.fixture(scope="module")
def gateway(broker: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    entries = [
        {"name": name, "sha256": digest(key)} | ({"rights": RIGHTS[name]} if name in RIGHTS else {})
        for name, key in KEYS.items()
    ]
    tree = {"models": {"demo": {"path": "x"}}, "gateway": {"port": 0, "api_keys": entries}}
    running = start_gateway_at(broker.url, tree, tmp_path_factory.mktemp("gateway"), forked=False)
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("name", "may"),
    [("requests", False), ("metrics", True), ("both", True), ("neither", False)],
)
def test_a_key_for_requests_does_not_read_metrics(gateway: Gateway, name: str, may: bool) -> None:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        got = http.get("/metrics", headers=headers)
    if may:
        assert "pagemill_http_requests_total" in got.text
    else:
        assert (got.status_code, got.json()["error"]["code"]) == (403, "missing_right")
        assert "pagemill_" not in got.text


def test_a_key_for_metrics_is_good_for_nothing_else(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {KEYS['metrics']}"}
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        for operation in OPERATIONS:
            if operation.public or operation.path == "/metrics":
                continue
            path = operation.path.replace("{", "").replace("}", "")
            got = http.request(operation.method, path, headers=headers)
            assert got.status_code == 403, (operation.path, got.text)


def test_without_keys_the_loopback_reads_metrics(broker: EmbeddedServer, tmp_path: Path) -> None:
    tree = {"models": {"demo": {"path": "x"}}, "gateway": {"port": 0}}
    gateway = start_gateway_at(broker.url, tree, tmp_path, forked=False)
    try:
        assert httpx.get(f"{gateway.url}/metrics", trust_env=False).status_code == 200
    finally:
        gateway.stop()
