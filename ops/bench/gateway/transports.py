"""Three transports for one request: NATS, our gateway, and vLLM's server.

The HTTP client is as lean as possible and reuses its connections, because the server is measured.
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ops.bench.peers.pagemill import sampling
from ops.bench.peers.protocol import Request
from ops.bench.servers import MODEL
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.protocol.requests import (
    ContentPart,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)

# The limit of a line is large enough for log probabilities, which are not used here.
MAX_LINE = 2**20
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with the URLs of its images, and fields of its body over HTTP."""

    request: Request
    urls: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> "Prepared":
        return cls(request) if request.image is None else cls.with_images(request, [request.image])

    @classmethod
    def with_images(cls, request: Request, files: Sequence[str]) -> "Prepared":
        contents = [base64.b64encode(Path(file).read_bytes()).decode() for file in files]
        return cls(request, tuple(f"data:image/png;base64,{data}" for data in contents))


@dataclass(frozen=True, slots=True)
class Times:
    first_s: float
    """Seconds to the first token at the client."""
    last_s: float
    gaps_s: tuple[float, ...] = ()
    """Times between two events of the stream, over HTTP."""

    @property
    def gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


class Transport(Protocol):
    async def __call__(self, prepared: Prepared) -> Times:
        """Send one request; raise RuntimeError for an answer that is not as requested."""


class OverNats:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, prepared: Prepared) -> Times:
        began_s = time.perf_counter()
        first_s, num_tokens = 0.0, 0
        async for record in ask(self._bus, _message_of(prepared), new_request_id()):
            match record:
                case TokenChunk():
                    first_s = first_s or time.perf_counter() - began_s
                case Finish():
                    num_tokens = record.usage.completion_tokens
                case Failure():
                    raise RuntimeError(record.error.message)
        return _checked(prepared, num_tokens, first_s, time.perf_counter() - began_s)


class OverHttp:
    """A streamed completion, or a chat completion for an image."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, prepared: Prepared) -> Times:
        began_s = time.perf_counter()
        first_s, before_s, gaps_s, last = 0.0, 0.0, list[float](), b""
        async for data in self._events(*_body_of(prepared)):
            now_s = time.perf_counter() - began_s
            if first_s:
                gaps_s.append(now_s - before_s)
            first_s, before_s = first_s or now_s, now_s
            if data != b"[DONE]":
                last = data
        took_s = time.perf_counter() - began_s
        usage = msgspec.json.decode(last).get("usage") or {}
        return _checked(prepared, usage.get("completion_tokens", 0), first_s, took_s, gaps_s)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            # Servers close connections that have been idle for long.
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, limit=MAX_LINE)

    async def _events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        reader, writer = await self._connection()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answered.partition(b"\r\n")[0]:
            writer.close()
            raise RuntimeError(answered.decode())
        async for line in _lines(reader):
            if line.startswith(DATA):
                yield line.removeprefix(DATA)
        self._idle.append((reader, writer))


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Read the lines of a chunked body."""
    rest = b""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        *lines, rest = (rest + chunk[:-2]).split(b"\n")
        for line in lines:
            yield line
    await reader.readline()


def _checked(
    prepared: Prepared, num_tokens: int, first_s: float, took_s: float, gaps_s: Sequence[float] = ()
) -> Times:
    if num_tokens != prepared.request.max_tokens:
        raise RuntimeError(f"{num_tokens} tokens instead of {prepared.request.max_tokens}")
    return Times(first_s, took_s, tuple(gaps_s))


def _message_of(prepared: Prepared) -> GenerateRequest:
    request = prepared.request
    if not prepared.urls:
        return GenerateRequest(
            MODEL, prompt_token_ids=request.token_ids, sampling_params=sampling(request)
        )
    images: list[ContentPart] = [ImagePart(ImageURL(url)) for url in prepared.urls]
    parts = [*images, TextPart(request.text)]
    return GenerateRequest(MODEL, [Message("user", parts)], sampling(request))


def _body_of(prepared: Prepared) -> tuple[str, bytes]:
    request = prepared.request
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **prepared.fields,
    }
    if not prepared.urls:
        return "/v1/completions", msgspec.json.encode(body | {"prompt": request.token_ids})
    images = [{"type": "image_url", "image_url": {"url": url}} for url in prepared.urls]
    parts = [*images, {"type": "text", "text": request.text}]
    body["messages"] = [{"role": "user", "content": parts}]
    return "/v1/chat/completions", msgspec.json.encode(body)
