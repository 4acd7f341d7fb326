"""Requests over HTTP at all gateways of a fleet, and what became of them."""

import asyncio
import base64
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from ops.harness.deployment import ROOT

AT_ONCE = 8
TIMEOUT_S = 120.0
# The header of a WAV file has 44 bytes.
MIN_SOUND_BYTES = 1000
_IMAGE = ROOT / "ops" / "demo_images" / "red.png"
_VIDEO = ROOT / "ops" / "demo_recordings" / "star_moves_right.webp"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and how its answer is judged."""

    path: str
    body: dict[str, Any]
    find_fault: Callable[[httpx.Response], str | None]
    """A function that returns the fault of an answer of status 200, and None for a complete one."""


def _chat_fault(answer: httpx.Response, num_choices: int = 1) -> str | None:
    choices = answer.json()["choices"]
    if len(choices) != num_choices:
        return f"{len(choices)} choices, not {num_choices}"
    return None if all(choice["finish_reason"] for choice in choices) else "an incomplete answer"


def _spoken_fault(answer: httpx.Response) -> str | None:
    message = answer.json()["choices"][0]["message"]
    return _chat_fault(answer) if (message.get("audio") or {}).get("data") else "no sound"


def _stream_fault(answer: httpx.Response) -> str | None:
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        return "a stream without its end"
    errors = [json.loads(event)["error"]["code"] for event in events[:-1] if '"error"' in event]
    return errors[0] if errors else None


def _speech_fault(answer: httpx.Response) -> str | None:
    is_sound = answer.content.startswith(b"RIFF") and len(answer.content) > MIN_SOUND_BYTES
    return None if is_sound else "no sound"


def _painting_fault(answer: httpx.Response) -> str | None:
    png = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return None if png.startswith(b"\x89PNG") else "no image"


def _response_fault(answer: httpx.Response) -> str | None:
    status = answer.json()["status"]
    return None if status in ("completed", "incomplete") else f"the response is {status}"


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _chat(
    content: Any, find_fault: Callable[[httpx.Response], str | None] = _chat_fault, **more: Any
) -> Kind:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], **more}
    return Kind("/v1/chat/completions", body, find_fault)


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


_QUESTION = "What can you do?"
_IMAGE_PART = _part("image_url", _url("image/png", _IMAGE.read_bytes()))
_VIDEO_PART = _part("video_url", _url("image/webp", _VIDEO.read_bytes()))

KINDS = (
    _chat(_QUESTION),
    # Longer than what a prefill worker leaves.
    _chat(f"{_QUESTION} " * 30, _stream_fault, stream=True),
    _chat([_IMAGE_PART, {"type": "text", "text": "What color is the shape?"}]),
    _chat(
        "Name a color.",
        partial(_chat_fault, num_choices=2),
        n=2,
        temperature=1.0,
        seed=3,
        logprobs=True,
    ),
    _chat("Name a color.", response_format={"type": "json_object"}),
    _chat([_VIDEO_PART, {"type": "text", "text": "Which way does it move?"}]),
    _chat(
        _QUESTION,
        _spoken_fault,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    ),
    Kind("/v1/audio/speech", {"model": "demo", "input": "Hello."}, _speech_fault),
    Kind("/v1/images/generations", {"model": "painter", "prompt": "a red circle"}, _painting_fault),
    Kind("/v1/responses", {"model": "demo", "input": _QUESTION}, _response_fault),
)


@dataclass
class Tally:
    """Outcomes of the requests of one cell."""

    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def total(self) -> int:
        return self.answered + self.failures.total()


async def send_all(gateways: Sequence[str], number: int) -> Tally:
    """Send requests to the gateways in turn, and wait for all answers."""
    tally = Tally()
    pairs = zip(range(number), itertools.cycle(gateways), strict=False)
    # A run of kinds at each gateway: otherwise one gateway would get the same kinds only.
    work = iter([(url, KINDS[n // len(gateways) % len(KINDS)]) for n, url in pairs])
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:

        async def send() -> None:
            loop = asyncio.get_running_loop()
            for url, kind in work:
                began = loop.time()
                failure = await _send(client, url, kind)
                tally.slowest_s = max(tally.slowest_s, loop.time() - began)
                if failure is None:
                    tally.answered += 1
                else:
                    tally.failures[f"{kind.path}: {failure}"] += 1

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return tally


async def _send(client: httpx.AsyncClient, url: str, kind: Kind) -> str | None:
    """Return None for a complete answer, and otherwise what is wrong."""
    try:
        answer = await client.post(url + kind.path, json=kind.body)
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code != 200:
        refusal = answer.json().get("error", {})
        return f"{answer.status_code} {refusal.get('code')}: {refusal.get('message')}"
    return kind.find_fault(answer)
