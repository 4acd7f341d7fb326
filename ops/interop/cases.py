"""Requests for both servers, with greedy decoding, so that each has one right answer."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ops.bench.servers import MODEL


@dataclass(frozen=True, slots=True)
class Case:
    """A chat request with its name in the report."""

    name: str
    chat: dict[str, Any]
    compares_text: bool = True
    """Whether the answer is compared as text, too; not where it ends within a character."""


def cases() -> list[Case]:
    # No case has 16 tokens. That is the default of vLLM's parameters, so vLLM's renderer omits the
    # number, and without one an engine uses all the room of the context.
    return [
        Case("text", chat(["Hello there"], max_tokens=15)),
        Case("image", chat([image_url(0, 112, 56), "Describe."], max_tokens=15)),
        Case("image, resized", chat([image_url(1, 333, 197), "What is this?"], max_tokens=15)),
        Case(
            "two images with text between",
            chat([image_url(2, 84, 140), "and", image_url(3, 224, 224), "?"], max_tokens=15),
        ),
        Case("the same image twice", chat([image_url(0, 112, 56)] * 2, max_tokens=8)),
        Case(
            "penalties and a seed",
            chat(["Tell me"], max_tokens=24, seed=7, repetition_penalty=1.3, ignore_eos=True),
        ),
        Case(
            "biases and bad words",
            chat(["Say"], max_tokens=12, logit_bias={"300": 5.0}, presence_penalty=0.5),
        ),
        Case("stop tokens", chat(["Go on"], max_tokens=32, stop_token_ids=[10, 20, 30])),
        Case("an image after a system message", _with_system([image_url(4, 70, 90)])),
    ]


Content = str | dict[str, Any]
"""A text, the URL of an image, or a part of another type."""


def chat(parts: Sequence[Content], **sampling: Any) -> dict[str, Any]:
    content = [_part(part) for part in parts]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0} | sampling


def _with_system(parts: list[str]) -> dict[str, Any]:
    request = chat(parts, max_tokens=15)
    request["messages"].insert(0, {"role": "system", "content": "You are terse."})
    return request


def _part(content: Content) -> dict[str, Any]:
    if not isinstance(content, str):
        return content
    if content.startswith("data:"):
        return {"type": "image_url", "image_url": {"url": content}}
    return {"type": "text", "text": content}


def image_url(seed: int, width: int, height: int) -> str:
    """Return an image with smooth colours, as in a photograph, which depend on the seed."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
