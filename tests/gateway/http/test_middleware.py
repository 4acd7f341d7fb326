"""Invalid and oversized requests, and the format of every error response."""

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shared.bus.bus import Bus
from tests.cluster.conftest import Cluster, stopped
from tests.gateway.conftest import Gateway, Start, start_gateway_at
from tests.gateway.http.test_auth import raw
from tests.gateway.routes.test_chat import question

PATH = "/v1/chat/completions"
POST = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
INSIDES = re.compile(r"Traceback|/site-packages|\.py|0x[0-9a-f]{6}|nats|127\.0\.0\.1|pm\.")


def check_error(body: bytes, code: str, param: str | None = None) -> None:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    assert INSIDES.search(error["message"]) is None, error


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]} | fields


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        value = {"properties": {"a": value}} if depth < 100 else {"a": value}
    return value


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


CASES: list[tuple[dict[str, Any], int, str, str | None]] = [
    (ask(model="other"), 404, "unknown_model", "model"),
    (ask(tempreature=1), 400, "unknown_parameter", "tempreature"),
    ({"model": "demo"}, 400, "invalid_request", "messages"),
    (ask(messages=[{"content": "a"}]), 400, "invalid_request", "messages[0].role"),
    (ask(temperature=3), 400, "invalid_request", "temperature"),
    (ask(temperature="hot"), 400, "invalid_request", "temperature"),
    (ask(messages=[]), 400, "invalid_request", "messages"),
    (ask(messages=[{"role": "robot", "content": ""}]), 400, "invalid_request", "messages[0].role"),
    (ask(messages=[{"role": "user"}]), 400, "invalid_request", "messages[0].content"),
    (ask(audio={"voice": "x", "format": "wav"}), 400, "invalid_request", "audio"),
    (ask(modalities=["audio"]), 400, "invalid_request", "modalities"),
    (ask(functions=[]), 400, "unsupported_parameter", "functions"),
    (ask(chat_template="{{x}}"), 400, "unsupported_parameter", "chat_template"),
    (ask(length_penalty=2), 400, "unsupported_parameter", "length_penalty"),
    (ask(stream_options={}), 400, "invalid_request", "stream_options"),
    (ask(top_logprobs=1), 400, "invalid_request", "top_logprobs"),
    (ask(max_tokens=1, max_completion_tokens=2), 400, "invalid_request", "max_completion_tokens"),
    (ask(tool_choice="auto"), 400, "invalid_request", "tool_choice"),
    (
        ask(response_format={"type": "json_object"}, guided_regex="a"),
        400,
        "invalid_request",
        "guided_regex",
    ),
    (ask(timeout_s=1e9), 400, "invalid_request", "timeout_s"),
    (ask(adapter="none"), 404, "unknown_adapter", "adapter"),
    (ask(max_tokens=10**6), 400, "context_length_exceeded", None),
    (question(url="data:image/png;base64,AAAA"), 422, "invalid_media", None),
    (question(url="https://example.org/x.png"), 403, "media_url_blocked", None),
    (question(url=f"media:{'0' * 64}"), 422, "media_not_found", None),
    (question(url="data:image/png;base64," + "A" * 300_000 + "!"), 422, "invalid_media", None),
    (question(url="data:image/png;base64," + "é" * 300_000), 422, "invalid_media", None),
    (ask(chat_template_kwargs={"x": nested(600)}), 400, "invalid_request", "chat_template_kwargs"),
    (ask(chat_template_kwargs={"x": 2**70}), 400, "invalid_request", "chat_template_kwargs"),
    (
        ask(tools=[tool(nested(600))], tool_choice="required"),
        400,
        "invalid_request",
        "tools",
    ),
    (ask(guided_json=nested(40)), 400, "invalid_request", "guided_json"),
    (ask(guided_json={"const": 2**70}), 400, "invalid_request", "guided_json"),
    (ask(stop_token_ids=[2**70]), 400, "invalid_request", "stop_token_ids[0]"),
    (ask(logit_bias={"100000": 1}), 400, "invalid_request", "logit_bias"),
]
PARTS = ("video_embeds", "audio_embeds")
CASES += [
    (
        ask(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}]),
        400,
        "unsupported_content",
        "messages[0].content[0]",
    )
    for kind in PARTS
]


async def test_errors_have_a_status_a_code_and_a_field(http: httpx.AsyncClient) -> None:
    for body, status, code, param in CASES:
        await check_answer(http, body, status, code, param)


async def check_answer(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    got = await http.post(PATH, json=body)
    assert (got.status_code, got.json()["error"]["code"]) == (status, code), (got.text, body)
    check_error(got.content, code, param)
    streamed = await http.post(PATH, json={"stream_options": None} | body | {"stream": True})
    if "stream_options" not in body:
        assert streamed.status_code == status, streamed.text
        check_error(streamed.content, code, param)


@pytest.mark.parametrize("timeout_s", [1e-9, 0.3])
async def test_a_deadline_that_no_engine_meets_is_a_504(
    http: httpx.AsyncClient, cluster: Cluster, bus: Bus, timeout_s: float
) -> None:
    with stopped(await cluster.pid(bus, "engine")):
        await check_answer(http, ask(timeout_s=timeout_s), 504, "deadline_exceeded", None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": NaN}',
        b'{"model": "demo", "messages": ' + b"[" * 100_000,
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "metadata": '
        + b'{"a":' * 100_000,
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "seed": 1'
        + b"0" * 400
        + b"}",
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "seed": 1e999}',
    ],
)
async def test_invalid_json_is_a_400(http: httpx.AsyncClient, body: bytes) -> None:
    got = await http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert got.status_code == 400, got.text
    check_error(got.content, "invalid_request")


async def test_urls_methods_and_types(http: httpx.AsyncClient) -> None:
    check_error((await http.get("/nothing")).content, "unknown_url")
    wrong = await http.get(PATH)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    check_error(wrong.content, "method_not_allowed")
    text = await http.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415
    packed = await http.post(PATH, json={}, headers={"content-encoding": "gzip"})
    assert packed.status_code == 415
    assert "Content-Encoding" in packed.json()["error"]["message"]
    check_error(text.content, "unsupported_content_type")


async def test_the_access_log_has_a_line_for_each_request(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    start = gateway.log.stat().st_size
    answer = await http.post(f"{PATH}?secret=1", json=ask(max_tokens=3))
    refused = await http.get("/nothing")
    lines = gateway.log.read_bytes()[start:].splitlines()
    first, second = [each for each in map(json.loads, lines) if each["event"] == "http_request"]
    usage = answer.json()["usage"]
    assert (first["method"], first["path"], first["status"]) == ("POST", PATH, 200)
    assert first["request_id"] == answer.headers["x-request-id"]
    assert first["prompt_tokens"] == usage["prompt_tokens"]
    assert first["completion_tokens"] == usage["completion_tokens"]
    assert (second["status"], second["request_id"]) == (404, refused.headers["x-request-id"])
    assert second["completion_tokens"] is None


async def test_bodies_have_a_limit(another: Start) -> None:
    gateway = another(max_body_mib=1, body_timeout_s=0.5, upload_timeout_s=1.0)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        got = await http.post(PATH, json=question(url="x" * 2**20))
        assert got.status_code == 413
        check_error(got.content, "body_too_large")

    promised = await raw(gateway, POST + b"Content-Length: 2147483648\r\n\r\n")
    assert promised.startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    endless = POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 17
    assert (await raw(gateway, endless)).startswith(b"HTTP/1.1 413")
    slow = await raw(gateway, POST + b"Content-Length: 100\r\n\r\n{")
    assert slow.startswith(b"HTTP/1.1 408")
    tiny = await raw(gateway, POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000)
    assert tiny.startswith(b"HTTP/1.1 413")
    form = {"content-type": "multipart/form-data; boundary=XX"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        for path in ("/v1/files", "/v1/audio/transcriptions"):
            packed = await http.post(path, headers=form | {"content-encoding": "gzip"})
            assert packed.status_code == 415
    dripping = await _drip(gateway)
    assert dripping.startswith(b"HTTP/1.1 408")
    assert b"within 1 s" in dripping


async def _drip(gateway: Gateway) -> bytes:
    """Return the answer to a file that never ends, whose pieces all come in time."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    part = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    writer.write(head + b"Content-Type: multipart/form-data; boundary=XX\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    answering = asyncio.create_task(_read_answer(reader))
    while not answering.done():
        writer.write(b"1\r\nx\r\n")
        await asyncio.wait([answering], timeout=0.1)
    writer.close()
    return answering.result()


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Read an answer with a small body, which may come in a packet after its headers."""
    headers = await reader.readuntil(b"\r\n\r\n")
    return headers + await reader.read(4096)


async def test_a_body_of_countless_values_is_not_decoded(http: httpx.AsyncClient) -> None:
    head = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "metadata": {"x": ['
    body = head + b"[]," * 600_000 + b"[]]}}"
    for path in (PATH, "/v1/completions", "/tokenize"):
        got = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert got.status_code == 413, path
        assert got.json()["error"]["code"] == "body_too_large"


async def test_all_bodies_together_have_a_limit(another: Start) -> None:
    gateway = another(max_body_mib=1, body_timeout_s=2.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(17)]
    for _, writer in held:
        writer.write(POST + b"Content-Length: 1048576\r\n\r\n" + b" " * (2**20 - 1))
        await writer.drain()
    statuses = [(await reader.readline())[9:12] for reader, _ in held]
    assert sorted(statuses) == [b"408"] * 16 + [b"503"]
    for _, writer in held:
        writer.close()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        assert (await http.post(PATH, json=ask(max_tokens=1))).status_code == 200


async def test_a_pipelined_body_may_arrive_slowly(gateway: Gateway) -> None:
    """The response to the request before it has ended already."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(ask(max_tokens=1)).encode()
    next_one = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + next_one + body[:5])
    await asyncio.sleep(2.5)
    writer.write(body[5:])
    answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1 200") == 2


async def test_headers_have_a_limit(another: Start) -> None:
    gateway = another(max_header_kib=8, header_timeout_s=0.5)
    start = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    for attack in (
        start + b"X-Large: " + b"x" * 10**6,
        start + b"X-Large: " + b"x" * 9000 + b"\r\n\r\n",
        start + b"".join(b"X-%d: y\r\n" % i for i in range(10_000)),
        start + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        assert (await raw(gateway, attack)).startswith(b"HTTP/1.1 431"), attack[:80]
    late = await raw(gateway, start)
    assert late.startswith(b"HTTP/1.1 408")
    check_error(late.partition(b"\r\n\r\n")[2], "request_timeout")


async def test_many_silent_clients_do_not_block_others(another: Start) -> None:
    gateway = another(header_timeout_s=1.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    crowd = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
    for _, writer in crowd:
        writer.write(b"GET / HTTP/1.1\r\n")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 200
    for reader, writer in crowd:
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()


def test_the_gateway_loads_no_model_library(cluster: Cluster, tmp_path: Path) -> None:
    """Neither torch nor transformers nor PIL is mapped into the process."""
    tree = yaml.safe_load(cluster.config.read_text()) | {"gateway": {"port": 0}}
    gateway = start_gateway_at(cluster.url, tree, tmp_path, forked=False)
    maps = Path(f"/proc/{gateway.process.pid}/maps").read_text()
    gateway.stop()
    assert "/msgspec/" in maps
    for library in ("torch", "transformers", "PIL"):
        assert f"/{library}/" not in maps


async def certificate(folder: Path) -> ssl.SSLContext:
    """Write cert.pem and key.pem for 127.0.0.1; return a client context that trusts them."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    return ssl.create_default_context(cafile=cert)


async def test_a_certificate_enables_https(another: Start, tmp_path: Path) -> None:
    trust = await certificate(tmp_path)
    gateway = another(tls_cert="cert.pem", tls_key="key.pem")
    assert gateway.url.startswith("https://")
    async with httpx.AsyncClient(base_url=gateway.url, verify=trust, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 200
