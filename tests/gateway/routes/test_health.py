"""Endpoints for operators, load balancers and Prometheus."""

import asyncio

import httpx
import pytest

from shared.bus.bus import Bus
from shared.stage.runtime import VERSION
from tests.gateway.conftest import Start, free_port


async def test_health_readiness_and_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    ready = await http.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "models": {"demo": "ok"}}
    assert (await http.get("/version")).json() == {"version": VERSION}


@pytest.mark.parametrize("data", [b"\xff", b"{}", b'{"role": 5}'])
async def test_a_foreign_heartbeat_does_not_make_a_gateway_unready(
    http: httpx.AsyncClient, bus: Bus, data: bytes
) -> None:
    await bus.publish_heartbeat("foreign-health-test", data)
    # The gateway reads heartbeats again after half a second.
    await asyncio.sleep(0.6)
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"demo": "ok"})


async def test_models_are_listed(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == ("demo", "model")
    assert (await http.get("/v1/models/demo")).json() == model
    unknown = await http.get("/v1/models/other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_model"


async def test_responses_are_counted(http: httpx.AsyncClient) -> None:
    await http.get("/nowhere")
    text = (await http.get("/metrics")).text
    assert 'pagemill_http_requests_total{endpoint="none"' in text
    assert 'status="404"' in text
    assert "pagemill_http_requests_in_flight" in text
    assert "nowhere" not in text


async def test_a_used_port_is_a_config_error(another: Start) -> None:
    port = free_port()
    another(port)
    with pytest.raises(AssertionError, match=r"gateway\.port: cannot listen at 127\.0\.0\.1"):
        another(port)
