"""API keys, rate limits and tenants, and attempts to bypass them."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.bus.bus import Bus
from shared.config.parsing import parse_config
from shared.config.schema import ApiKey, Config, GatewayConfig, ModelConfig
from shared.errors import ConfigError
from shared.protocol.records import Finish
from shared.state.token_log import last_record
from shared.telemetry.metrics import Metrics
from tests.gateway.conftest import Gateway, Start
from tests.gateway.routes.test_chat import events, question
from workers.gateway.app import AppContext, responder_of
from workers.gateway.http.auth import Caller, Keyring, RateLimiter, digest, make_key
from workers.gateway.http.errors import InvalidKey, RateLimited
from workers.gateway.http.middleware import EdgeMiddleware
from workers.gateway.http.origins import OriginPolicy
from workers.gateway.openapi.document import OPERATIONS
from workers.gateway.worker import all_routes

ALICE, BOB = make_key(), make_key()
KEYS = [
    {"name": "alice", "sha256": digest(ALICE)},
    {"name": "bob", "sha256": digest(BOB), "tenant": "bobs"},
]
PUBLIC = {"/health", "/ready", "/openapi.json"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@given(st.lists(st.text(max_size=60), max_size=2))
def test_a_request_without_a_valid_key_is_refused(headers: list[str]) -> None:
    keyring = Keyring([ApiKey("alice", digest(ALICE))])
    with pytest.raises(InvalidKey):
        keyring.authenticate(headers)
    assert keyring.authenticate([f"Bearer {ALICE}"]).tenant == "alice"
    with pytest.raises(InvalidKey):
        keyring.authenticate([f"Bearer {ALICE}", *headers, "Bearer"])


def test_rate_and_concurrency_limits_of_a_key() -> None:
    now = 0.0
    limiter = RateLimiter(lambda: now)
    key = ApiKey("alice", digest(ALICE), max_requests_per_minute=2, max_concurrent=1)
    caller = Caller("alice", "alice", key)
    limiter.acquire(caller)
    with pytest.raises(RateLimited) as busy:
        limiter.acquire(caller)
    assert busy.value.retry_after_s == 1.0
    limiter.release(caller)
    limiter.acquire(caller)
    limiter.release(caller)
    with pytest.raises(RateLimited) as fast:
        limiter.acquire(caller)
    assert fast.value.retry_after_s == pytest.approx(30.0)
    now = 30.0
    limiter.acquire(caller)
    limiter.acquire(Caller("", ""))  # without a key there is no limit


def test_a_key_that_was_idle_for_long_may_send_no_more_than_its_limit_at_once() -> None:
    now = 0.0
    limiter = RateLimiter(lambda: now)
    caller = Caller("alice", "alice", ApiKey("alice", digest(ALICE), max_requests_per_minute=2))
    for now in (0.0, 3600.0):  # noqa: B007
        for _ in range(2):
            limiter.acquire(caller)
        with pytest.raises(RateLimited) as fast:
            limiter.acquire(caller)
        assert fast.value.retry_after_s == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"listen": "0.0.0.0"}, "gateway.api_keys"),
        ({"listen": "example.org"}, "gateway.api_keys"),
        ({"api_keys": [{"name": "a b", "sha256": "0" * 64}]}, "gateway.api_keys[0].name"),
        ({"api_keys": [{"name": "a", "sha256": "key"}]}, "gateway.api_keys[0].sha256"),
        ({"api_keys": [{"name": "a", "sha256": "0" * 64}] * 2}, "gateway.api_keys"),
        ({"tls_cert": "cert.pem"}, "gateway.tls_key"),
    ],
)
def test_an_insecure_configuration_is_refused(section: dict[str, Any], field: str) -> None:
    text = str({"models": {"demo": {"path": "x"}}, "gateway": section})
    with pytest.raises(ConfigError) as refused:
        parse_config(text, {}, "test")
    assert refused.value.field == field


async def test_every_route_but_the_public_ones_needs_a_key(another: Start, bus: Bus) -> None:
    config = Config({"demo": ModelConfig("x")}, gateway=GatewayConfig(page=False))
    routes = all_routes(AppContext(bus, config, Metrics("gateway", "x"), "x"))
    gateway = another(api_keys=KEYS, page=False)
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        for route in routes:
            path = route.path.replace("{", "").replace("}", "")
            for method in (route.methods or set()) - {"HEAD"}:
                got = await http.request(method, path, headers={"api-key": ALICE})
                status = 200 if route.path in PUBLIC else 401
                assert got.status_code == status, (method, path)
                if status == 401:
                    assert got.json()["error"]["code"] == "invalid_api_key"
                    assert got.headers["www-authenticate"] == "Bearer"
        listed = await http.get("/v1/models", headers=bearer(ALICE))
        assert [model["max_model_len"] for model in listed.json()["data"]] == [1024]
        assert (await http.get("/v1/models", headers=bearer(ALICE[:-1]))).status_code == 401


TRICKS = [
    "GET /v1/models HTTP/1.1\r\nHost: a/health?\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: localhost/health\r\n\r\n",
    "GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET http://health/v1/models HTTP/1.1\r\nHost: health\r\n\r\n",
    "GET //v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health/%2e%2e/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1%2fmodels HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /V1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models;/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models?/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: OPTIONS\r\n\r\n",
    "GET /v1/models HTTP/1.0\r\n\r\n",
    "OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    "0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \r\nAuthorization: x\r\n\r\n",
    "\x00\x01 / HTTP/9.9\r\n\r\n",
]


async def test_host_headers_and_odd_paths_do_not_bypass_the_key(another: Start) -> None:
    gateway = another(api_keys=KEYS, page=False)
    answers = await asyncio.gather(*(raw(gateway, trick.encode("latin-1")) for trick in TRICKS))
    for trick, answer in zip(TRICKS, answers, strict=True):
        status = answer.split(b"\r\n", 1)[0]
        assert b" 200" not in status, (trick, answer)
        assert b"demo" not in answer, trick
    assert gateway.process.poll() is None


async def raw(gateway: Gateway, data: bytes) -> bytes:
    """Send raw bytes and return the response that arrives within a second."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(1.0):
            while more := await reader.read(65536):
                answer += more
    writer.close()
    return answer


async def test_tenants_do_not_see_each_others_requests(another: Start, bus: Bus) -> None:
    gateway = another(api_keys=KEYS)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        named = {"x-request-id": "the-same-id"}
        path = "/v1/chat/completions"
        first = await http.post(path, json=question(), headers=bearer(ALICE) | named)
        again = await http.post(path, json=question(), headers=bearer(ALICE) | named)
        other = await http.post(path, json=question(), headers=bearer(BOB) | named)
        assert first.json() == again.json()
        # Each tenant has its own ids.
        assert other.headers["x-request-id"] == first.headers["x-request-id"] == "the-same-id"
        for key, answer in ((ALICE, first), (BOB, other)):
            own = await http.get("/v1/requests/the-same-id", headers=bearer(key))
            assert own.json()["result"] == answer.json()
        # On the bus, the same ids belong to the tenants' own clients.
        for request_id in ("the-same-id@alice", "the-same-id@bobs"):
            assert isinstance(await last_record(bus, request_id), Finish)
        assert await last_record(bus, "the-same-id") is None
        first = await http.post(path, json=question(), headers=bearer(ALICE))
        url = f"/v1/requests/{first.headers['x-request-id']}"
        for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/stream")):
            hidden = await http.request(method, url + suffix, headers=bearer(BOB))
            unknown = await http.request(
                method, f"/v1/requests/chatcmpl-{'0' * 32}{suffix}", headers=bearer(BOB)
            )
            assert (hidden.status_code, hidden.content) == (404, unknown.content)
        status = (await http.get(url, headers=bearer(ALICE))).json()
        assert (status["state"], status["result"]) == ("finished", first.json())
        # A prompt that one tenant has cached is not cached for the other.
        assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_key_over_its_limit_gets_429(another: Start) -> None:
    limited = [KEYS[0] | {"max_requests_per_minute": 1}, KEYS[1] | {"max_concurrent": 1}]
    gateway = another(api_keys=limited)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        path = "/v1/chat/completions"
        assert (await http.post(path, json=question(), headers=bearer(ALICE))).status_code == 200
        refused = await http.post(path, json=question(), headers=bearer(ALICE))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200

        long = question() | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        async with http.stream("POST", path, json=long, headers=bearer(BOB)) as stream:
            assert stream.status_code == 200
            busy = await http.post(path, json=question(), headers=bearer(BOB))
            assert busy.status_code == 429
            async for _ in stream.aiter_lines():
                pass
        free = await http.post(path, json=question(), headers=bearer(BOB))
        assert free.status_code == 200


async def test_the_slot_is_released_before_the_final_byte() -> None:
    """A client may send its next request before the gateway has finished this one."""
    happened: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["release_slot"] = lambda: happened.append("released")
        await Response("whole")(scope, receive, send)
        happened.append("answered")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            happened.append("sent")

    async def receive() -> Message:
        return {"type": "http.request"}

    edge = EdgeMiddleware(
        app,
        GatewayConfig(),
        Metrics("gateway", "gateway-1"),
        responder_of,
        OriginPolicy(GatewayConfig()),
    )
    scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b""}
    await edge({**scope, "http_version": "1.0", "headers": []}, receive, send)
    assert happened == ["released", "sent", "answered"]


async def test_only_costly_endpoints_count_for_the_limit(another: Start) -> None:
    """A key at its limit can still look at its requests and cancel them."""
    gateway = another(api_keys=[KEYS[0] | {"max_requests_per_minute": 1}])
    async with httpx.AsyncClient(
        base_url=gateway.url, timeout=60, trust_env=False, headers=bearer(ALICE)
    ) as http:
        first = await http.post("/tokenize", json={"prompt": "Hi"})
        assert first.status_code == 200
        for operation in OPERATIONS:
            got = await http.request(operation.method, operation.path.replace("{id}", "x"))
            assert (got.status_code == 429) == operation.counted, operation.path
    free = {operation.path for operation in OPERATIONS if not operation.counted}
    facts = {"/health", "/ready", "/version", "/metrics", "/openapi.json"}
    assert free == facts | {
        "/v1/models", "/v1/models/{model}", "/v1/requests/{id}", "/inference/v1/abort_requests",
        "/v1/audio/voices", "/v1/images/{name}", "/v1/files/{file_id}",
        "/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items",
        "/v1/files", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel", "/v1/batches/{id}/results",
        "/v1/videos", "/v1/videos/{id}", "/v1/videos/{id}/content",
    }  # fmt: skip


async def test_configured_origins_get_cors_headers(another: Start) -> None:
    gateway = another(cors_origins=["https://chat.example"])
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        preflight = await http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        # OpenAI's package sends a dozen `x-stainless-…` headers, for which browsers ask permission.
        allowed = preflight.headers["access-control-allow-headers"].split(", ")
        assert {"authorization", "*"} <= set(allowed)
        other = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_streamed_answer_belongs_to_the_tenant_of_its_key(another: Start) -> None:
    gateway = another(api_keys=[KEYS[0], KEYS[1] | {"rights": ["requests", "metrics"]}])
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        streamed = await http.post(
            "/v1/chat/completions", json=question() | {"stream": True}, headers=bearer(BOB)
        )
        assert events(streamed.text)[-1] == ("", "[DONE]")
        metrics = (await http.get("/metrics", headers=bearer(BOB))).text
        assert "bobs" not in metrics
        assert BOB not in gateway.log.read_text()
