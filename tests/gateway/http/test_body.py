"""A body's values are counted before any of them becomes an object."""

from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from shared.config.schema import GatewayConfig
from shared.errors import InvalidRequest
from workers.gateway.http.body import BodyReader


def request_with(body: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [(b"[" + b"[]," * 50_000 + b"0]", "50000 values"), (b"[" * 65 + b"]" * 65, "64 levels")],
)
async def test_a_body_over_a_limit_is_not_decoded(
    value: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def decode(data: bytes, type: Any) -> Any:
        decoded.append(data)

    monkeypatch.setattr(msgspec.json, "decode", decode)
    reader = BodyReader(GatewayConfig())
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        await reader.decode(request_with(b'{"model": "demo", "x": %b}' % value), dict)
    assert caught.value.field == "x"
    assert decoded == []
    await reader.decode(request_with(b'{"x": [[], []]}'), dict)
    assert len(decoded) == 1
