"""Requests over HTTP at all gateways of a fleet, and what became of them."""

import asyncio
import base64
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ops.rolling.fleet import NEW

AT_ONCE = 8
TIMEOUT_S = 120.0
_IMAGE = NEW / "ops" / "demo_images" / "red.png"
_VIDEO = NEW / "ops" / "demo_recordings" / "star_moves_right.webp"


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _bodies(with_video: bool) -> list[dict[str, Any]]:
    """Return one body of each kind; their texts are longer than what a prefill worker leaves."""
    image = {"type": "image_url", "image_url": {"url": _url("image/png", _IMAGE.read_bytes())}}
    video = {"type": "video_url", "video_url": {"url": _url("image/webp", _VIDEO.read_bytes())}}
    long_text = "What can you do? " * 30
    kinds: list[dict[str, Any]] = [
        {"content": "What can you do?"},
        {"content": long_text, "stream": True},
        {"content": [image, {"type": "text", "text": "What color is the shape?"}]},
        {"content": "Name a color.", "n": 2, "temperature": 1.0, "seed": 3, "logprobs": True},
        {"content": "Name a color.", "response_format": {"type": "json_object"}},
    ]
    if with_video:
        kinds = [{"content": [video, {"type": "text", "text": "Which way does it move?"}]}]
    return kinds


@dataclass
class Tally:
    """What became of the requests of one cell."""

    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def total(self) -> int:
        return self.answered + self.failures.total()


async def send_all(gateways: Sequence[str], number: int, *, with_video: bool = False) -> Tally:
    """Send requests to the gateways in turn, and wait for all answers."""
    tally, bodies = Tally(), _bodies(with_video)
    pairs = zip(range(number), itertools.cycle(gateways), strict=False)
    # A run of kinds at each gateway: otherwise one gateway would get the same kinds only.
    work = iter([(url, bodies[n // len(gateways) % len(bodies)]) for n, url in pairs])
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:

        async def send() -> None:
            loop = asyncio.get_running_loop()
            for url, body in work:
                began = loop.time()
                failure = await _send(client, url, body)
                tally.slowest_s = max(tally.slowest_s, loop.time() - began)
                if failure is None:
                    tally.answered += 1
                else:
                    tally.failures[failure] += 1

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return tally


async def _send(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str | None:
    """Return None for a complete answer, and otherwise what is wrong."""
    parameters = {key: value for key, value in body.items() if key != "content"}
    question = {"model": "demo", "messages": [{"role": "user", "content": body["content"]}]}
    try:
        answer = await client.post(f"{url}/v1/chat/completions", json=question | parameters)
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code != 200:
        told = answer.json().get("error", {})
        return f"{answer.status_code} {told.get('code')}: {told.get('message')}"
    if not parameters.get("stream"):
        choices = answer.json()["choices"]
        is_complete = len(choices) == parameters.get("n", 1) and all(
            choice["finish_reason"] for choice in choices
        )
        return None if is_complete else "an incomplete answer"
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        return "a stream without its end"
    errors = [json.loads(event)["error"]["code"] for event in events[:-1] if '"error"' in event]
    return errors[0] if errors else None
