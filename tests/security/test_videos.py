"""Videos of tenants: found by their own tenant alone, ordered once, and gone when they expire."""

from collections.abc import Iterator

import httpx
import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import VideoJob
from tests.gateway.conftest import Gateway, start_gateway_at
from workers.gateway.http.auth import digest, make_key

KEYS = {tenant: make_key() for tenant in ("acme", "other")}
ORDER = {"model": "wan", "prompt": "a star", "frames": 5}


@pytest.fixture(scope="module")
def gateway(broker: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    keys = [{"name": name, "tenant": name, "sha256": digest(key)} for name, key in KEYS.items()]
    models = {"wan": {"path": "x", "graph": "wan"}, "demo": {"path": "x", "graph": "none"}}
    tree = {"models": models, "gateway": {"port": 0, "api_keys": keys}}
    running = start_gateway_at(broker.url, tree, tmp_path_factory.mktemp("gateway"), forked=False)
    yield running
    running.stop()


def client_of(gateway: Gateway, tenant: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.Client(base_url=gateway.url, timeout=60, trust_env=False, headers=headers)


def ids(http: httpx.Client) -> list[str]:
    return [video["id"] for video in http.get("/v1/videos").json()["data"]]


def test_another_tenant_does_not_find_a_video(gateway: Gateway) -> None:
    with client_of(gateway, "acme") as acme, client_of(gateway, "other") as other:
        order = acme.post("/v1/videos", json=ORDER, headers={"x-request-id": "named"})
        assert order.json()["status"] == "queued"
        assert (order.json()["id"], ids(acme), ids(other)) == ("named", ["named"], [])
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert other.request(method, f"/v1/videos/named{path}").status_code == 404
        assert other.get("/v1/videos", params={"after": "named"}).status_code == 404
        assert acme.delete("/v1/videos/named").json()["deleted"]
        assert ids(acme) == []


def test_an_order_with_the_name_of_an_earlier_one_is_the_same_video(gateway: Gateway) -> None:
    headers = {"idempotency-key": "star?"}
    with client_of(gateway, "acme") as acme:
        first, again = (acme.post("/v1/videos", json=ORDER, headers=headers) for _ in range(2))
        assert first.json() == again.json()
        assert ids(acme) == [first.json()["id"]]
        changed = acme.post("/v1/videos", json=ORDER | {"seed": 1}, headers=headers)
        assert changed.json()["error"]["code"] == "request_id_reused"


def test_a_model_that_makes_no_videos_is_refused(gateway: Gateway) -> None:
    with client_of(gateway, "acme") as acme:
        refused = acme.post("/v1/videos", json=ORDER | {"model": "demo"}).json()["error"]
    assert (refused["param"], refused["message"]) == ("model", "demo makes no videos")


async def test_an_expired_video_is_not_found(gateway: Gateway, bus: Bus) -> None:
    job = VideoJob("wan", "a star", "video", "832x480", 5, 16, 1_000_000_000, 600.0)
    await bus.publish_without_id(subjects.video_job("other", "old"), to_json(job))
    with client_of(gateway, "other") as other:
        assert ids(other) == []
        assert other.get("/v1/videos/old").status_code == 404
