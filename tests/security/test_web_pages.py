"""Attacks of web pages on a gateway without keys, which listens on the loopback address."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.bus.embedded_server import EmbeddedServer
from tests.gateway.conftest import Gateway, start_gateway_at

OWN = "pagemill.example"
CONFIG = {
    "hosts": [OWN],
    "public_url": "https://public.example:444",
    "cors_origins": ["https://friend.example"],
}
REBOUND = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "evil.example:80@127.0.0.1",
    "127.0.0.1:80:80",
    "127.0.0.1 evil.example",
    "[::1].evil.example",
    "[::1]evil.example:80",
    "[::1",
    "169.254.169.254",
    "0.0.0.0",
    "::1",
    "2130706433",
    f"{OWN}.evil.example",
    f"x{OWN}",
    "",
]
LOOPBACK = ["localhost", "LOCALHOST:1", "app.localhost:8000", "127.0.0.1", "127.8.9.1:80"]
HOSTS = [*LOOPBACK, "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:1", OWN, f"{OWN}:8000"]
HOSTS += ["public.example", "public.example:444"]
FOREIGN = [
    "https://evil.example",
    "null",
    "",
    "http://localhost.evil.example",
    "https://friend.example.evil.example",
    "http://friend.example",
    "https://friend.example:1",
    "http://localhost:3000",
    f"https://{OWN}.evil.example",
    f"https://{OWN}@evil.example",
    f"https://evil.example/{OWN}",
    "file://",
    "http://[",
    "https://xn--.example:x",
]


@pytest.fixture(scope="module")
def gateway(broker: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    tree = {"models": {"demo": {"path": "x"}}, "gateway": {"port": 0, **CONFIG}}
    running = start_gateway_at(broker.url, tree, tmp_path_factory.mktemp("gateway"), forked=False)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("host", REBOUND)
def test_no_name_of_a_stranger_leads_to_a_gateway_without_keys(
    http: httpx.Client, host: str
) -> None:
    for path in ("/", "/health", "/v1/models", "/openapi.json", "/nothing"):
        got = http.get(path, headers={"host": host})
        assert (got.status_code, got.json()["error"]["code"]) == (421, "foreign_host"), path
    assert "gateway.hosts" in got.json()["error"]["message"]
    assert got.json()["error"]["param"] == "Host"


@pytest.mark.parametrize("host", HOSTS)
def test_own_names_and_addresses_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200
    # The web page itself, which sends its origin with each request.
    origin = f"http://{host}"
    assert is_read(http.delete("/v1/requests/x", headers={"host": host, "origin": origin}))


@pytest.mark.parametrize("origin", FOREIGN)
def test_no_page_of_another_site_makes_a_gateway_work(http: httpx.Client, origin: str) -> None:
    headers = {"origin": origin}
    for path in ("/v1/files", "/v1/audio/transcriptions"):
        # A form needs no preflight.
        form = http.post(path, files={"file": b"x"}, data={"purpose": "vision"}, headers=headers)
        assert (form.status_code, form.json()["error"]["code"]) == (403, "foreign_origin")
    assert "gateway.cors_origins" in form.json()["error"]["message"]
    assert http.delete("/v1/requests/x", headers=headers).status_code == 403
    # Its page may link to ours, whose answer it cannot read.
    answer = http.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["https://friend.example", f"https://{OWN}", f"http://{OWN}:1"])
def test_pages_of_configured_sites_may_use_a_gateway(http: httpx.Client, origin: str) -> None:
    assert is_read(http.delete("/v1/requests/x", headers={"origin": origin}))


def test_a_page_behind_a_proxy_uses_the_public_url(http: httpx.Client) -> None:
    headers = {"origin": "https://public.example:444"}
    assert is_read(http.delete("/v1/requests/x", headers=headers))


def test_a_gateway_without_a_list_serves_the_loopback_alone(
    broker: EmbeddedServer, tmp_path: Path
) -> None:
    tree = {"models": {"demo": {"path": "x"}}, "gateway": {"port": 0}}
    gateway = start_gateway_at(broker.url, tree, tmp_path, forked=False)
    try:
        statuses = [
            httpx.get(f"{gateway.url}/health", headers={"host": host}, trust_env=False).status_code
            for host in ("localhost", OWN)
        ]
        assert statuses == [200, 421]
    finally:
        gateway.stop()


def is_read(got: httpx.Response) -> bool:
    """Whether the request came to its route, where there is no such request."""
    return got.status_code == 404
