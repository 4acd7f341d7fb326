"""Endpoints for operators, load balancers and Prometheus."""

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace
from starlette.requests import Request

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.codec import envelope
from shared.config.schema import AgentConfig, Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import MessageItem
from shared.protocol.messages import Heartbeat, RequestRecord, StartReport
from shared.protocol.steps import Begun
from shared.stage.runtime import VERSION
from shared.state import request_registry
from shared.state.step_log import StepLog
from shared.telemetry.metrics import Metrics
from tests.cluster.conftest import Cluster
from tests.gateway.conftest import Gateway, Start, free_port
from tests.tasks import engine_task
from workers.cli.commands.doctor import examine
from workers.gateway.app import AppContext, build_application
from workers.gateway.http.auth import Caller
from workers.gateway.openapi.document import KINDS
from workers.gateway.routes import health
from workers.gateway.worker import all_routes


async def test_health_readiness_and_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    ready = await http.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "models": {"demo": "ok"}}
    assert (await http.get("/version")).json() == {"version": VERSION}


async def test_the_doctor_finds_a_running_pagemill(gateway: Gateway, cluster: Cluster) -> None:
    findings = [finding async for finding in examine(cluster.config, cluster.url)]
    found = {(finding.check, finding.state) for finding in findings}
    assert {("models", "ok"), ("broker", "ok"), ("gateway", "ok"), ("page", "ok")} < found
    assert "failed" not in {state for _, state in found}


CONFIG = Config({"demo": ModelConfig("nowhere")})


async def describe_request(bus: Bus) -> tuple[str, str, str | None]:
    """Return the state that a gateway reports for a request in the queue of the engines."""
    request_id = f"r-{secrets.token_hex(4)}"
    record = RequestRecord("chat", "demo", "", int(bus.now_ms() / 1000), durable=True, timeout_s=60)
    await request_registry.register(bus, request_id, record, "gateway-1:1")
    task = envelope.encode(engine_task(request_id, [1], model="demo"), [])
    await bus.publish(subjects.stage("engine", "demo", "batch", request_id), task, request_id)
    app = AppContext(bus, CONFIG, Metrics("gateway", "gateway-1"), "gateway-1", KINDS)
    transport = httpx.ASGITransport(build_application(app, all_routes(app)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        status = (await client.get(f"/v1/requests/{request_id}")).json()
    return status["state"], status["stage"], status["waits_for"]


async def test_a_gateway_is_ready_without_engines_and_not_without_renderers(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(server.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())

    async def ask(*roles: str, **load: float) -> tuple[int, dict[str, Any]]:
        for role in roles:
            beat = Heartbeat(role, f"{role}-1", "0", 1, ["demo"], load)
            await bus.heartbeats.publish(beat.worker, to_json(beat))
        config = replace(CONFIG, agent=AgentConfig(store_mib=1))
        context = AppContext(bus, config, Metrics("gateway", "gateway-1"), "gateway-1")
        answer = await health.ready(context, Request({"type": "http"}), cast(Caller, None))
        return answer.status_code, json.loads(bytes(answer.body))

    try:
        missing = "no coordinator and no renderer and no engine"
        assert await ask() == (503, {"status": "not ready", "models": {"demo": missing}})
        # A worker that has lost its queue serves no requests.
        assert (await ask("coordinator", refused=1.0))[1]["models"] == {"demo": missing}
        missing = "no renderer and no engine"
        assert (await ask("coordinator"))[1]["models"] == {"demo": missing}
        ready = {"status": "ok", "models": {"demo": "no engine"}}
        assert await ask("coordinator", "renderer") == (200, ready)
        report = StartReport("engine", "engine-1", "0", 1, "loading", model="demo")
        await bus.heartbeats.publish_start("engine-1", to_json(report))
        ready = {"status": "ok", "models": {"demo": "engine is starting"}}
        assert await ask("coordinator", "renderer") == (200, ready)
        assert await describe_request(bus) == ("queued", "engine", "engine is starting")
        ready = {"status": "ok", "models": {"demo": "ok"}}
        assert await ask("coordinator", "renderer", "engine") == (200, ready)
        assert await describe_request(bus) == ("queued", "engine", None)
        large = MessageItem("user", "x" * 2**20)
        await StepLog(bus, "", "resp_large").append(Begun(0, 1, "demo", "", [large], {}))
        full = ready | {"responses": "store is full"}
        assert await ask("coordinator", "renderer", "engine") == (200, full)
    finally:
        await bus.close()
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("data", [b"\xff", b"{}", b'{"role": 5}'])
async def test_a_foreign_heartbeat_does_not_make_a_gateway_unready(
    http: httpx.AsyncClient, bus: Bus, data: bytes
) -> None:
    await bus.heartbeats.publish("foreign-health-test", data)
    # The gateway reads heartbeats again after half a second.
    await asyncio.sleep(0.6)
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"demo": "ok"})


async def test_models_are_listed(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == ("demo", "model")
    assert model["media"] == ["image", "video"]
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


async def test_a_gateway_with_a_used_port_ends(another: Start) -> None:
    port = free_port()
    another(port)
    with pytest.raises(AssertionError, match=f"gateway.port: port {port} of 127.0.0.1 is in use"):
        another(port)
