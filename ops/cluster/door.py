"""Clients of the cluster's door: questions about images with known answers, and long answers."""

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ops.demo import IMAGES, Case
from ops.harness.load import at_rate
from ops.harness.samples import Samples

PATH = "/v1/chat/completions"
SPEECH_PATH = "/v1/audio/speech"
# A client of a door that restarts sends the same request, under the same id, again.
RETRY_S = 0.5
PATIENCE_S = 120.0
_RETRIED = (429, 502, 503)
END = "data: [DONE]"


class Refused(RuntimeError):
    """The door has refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read_cases() -> list[Case]:
    return msgspec.json.decode((IMAGES / "questions.json").read_bytes(), type=list[Case])


def _image_part(name: str) -> dict[str, Any]:
    kind = "jpeg" if Path(name).suffix == ".jpg" else "png"
    data = base64.b64encode((IMAGES / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


@dataclass
class Tally:
    """The outcomes of many requests."""

    latencies_s: list[float] = field(default_factory=list)
    num_retries: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return len(self.latencies_s) + len(self.failures)

    def percentile_s(self, share: float) -> float:
        """Return the latency that this share of the requests did not exceed."""
        return Samples(self.latencies_s).percentile(100 * share) if self.latencies_s else 0.0


class Door:
    """One client of the published port."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, body: dict[str, Any], tally: Tally) -> str:
        """Return the text of a streamed answer. A request without an answer is sent again.

        Raises RuntimeError after PATIENCE_S, or at a response that is no answer.
        """
        headers = {"X-Request-Id": f"cluster-{secrets.token_hex(8)}"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return "".join([piece async for piece in self._pieces(body, "answer", headers)])
            except Refused as refused:
                reason, again = str(refused), refused.status in _RETRIED
            except httpx.TransportError as error:
                reason, again = f"{type(error).__name__} {error}", True
            if not again or time.monotonic() > deadline:
                raise RuntimeError(reason)
            tally.num_retries += 1
            await asyncio.sleep(RETRY_S)

    async def ask(self, case: Case, tally: Tally) -> None:
        """Ask one question, and count the answer as right or as a failure."""
        content = [*map(_image_part, case.images), {"type": "text", "text": case.question}]
        began = time.monotonic()
        try:
            messages = [{"role": "user", "content": content}]
            # The answer is stored under its id, so that a repetition finds it.
            body = {"model": "demo", "messages": messages, "temperature": 0, "durable": True}
            text = await self.post(body, tally)
        except (RuntimeError, ValueError, KeyError) as error:
            tally.failures.append(f"{case.question}: {error}")
            return
        if case.expect in text.lower():
            tally.latencies_s.append(time.monotonic() - began)
        else:
            tally.failures.append(f"{case.question}: {text!r}")

    async def ask_all(self, cases: list[Case]) -> Tally:
        """Ask all questions at once."""
        tally = Tally()
        await asyncio.gather(*(self.ask(case, tally) for case in cases))
        return tally

    async def ask_steadily(self, per_s: float, stop: asyncio.Event, tally: Tally) -> None:
        """Ask `per_s` questions a second until `stop`, and wait for the last answers."""
        cases = read_cases()
        await at_rate(
            per_s,
            lambda number: self.ask(cases[number % len(cases)], tally),
            lambda _: stop.is_set(),
        )

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, body: dict[str, Any], name: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Yield a response before its body is read. Raises Refused."""
        async with self._client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                reason = (await response.aread()).decode(errors="replace")[:300]
                raise Refused(f"{name}: {response.status_code} {reason}", response.status_code)
            yield response

    async def _pieces(
        self, body: dict[str, Any], name: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[str]:
        """Yield the pieces of a streamed text. Raises RuntimeError for one without an end."""
        async with self._stream(PATH, body | {"stream": True}, name, headers) as response:
            async for line in response.aiter_lines():
                if line == END:
                    return
                if line.startswith("data: {"):
                    chunk = msgspec.json.decode(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(f"{name}: {chunk['error']}")
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""
        raise RuntimeError(f"{name}: the stream has no end")

    async def long_texts(self, count: int, num_tokens: int, begun: asyncio.Event) -> list[str]:
        """Return `count` sampled answers of `num_tokens` tokens; `begun` is set when all have
        begun.

        Raises RuntimeError for a response that is no answer. In this case `begun` is not set.
        """
        waiting = set(range(count))

        async def stream(number: int) -> str:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
                "temperature": 0.8,
                "seed": number,
                "max_tokens": num_tokens,
                "ignore_eos": True,
            }
            text = ""
            async for piece in self._pieces(body, f"answer {number}"):
                text += piece
                if text:
                    waiting.discard(number)
                    if not waiting:
                        begun.set()
            return text

        return list(await asyncio.gather(*(stream(number) for number in range(count))))

    async def speeches(self, texts: Sequence[str], begun: asyncio.Event) -> list[bytes]:
        """Return the samples of each text; `begun` is set when all speeches have begun.

        Raises RuntimeError for a response that is no speech; `begun` is not set then.
        """
        waiting = set(texts)

        async def listen(text: str) -> bytes:
            body = {"model": "demo", "input": text, "voice": "alloy", "response_format": "pcm"}
            samples = b""
            async with self._stream(SPEECH_PATH, body, repr(text)) as response:
                async for piece in response.aiter_bytes():
                    samples += piece
                    waiting.discard(text)
                    if not waiting:
                        begun.set()
            return samples

        return list(await asyncio.gather(*map(listen, texts)))
