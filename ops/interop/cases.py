"""What both servers are asked: greedy, so that there is one right answer."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ops.bench.servers import MODEL


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    chat: dict[str, Any]


def cases() -> list[Case]:
    # Not 16 tokens: that is the default of vLLM's parameters, so its render leaves the number out,
    # and who generates takes what is left out for all that there is room for.
    return [
        Case("text", _chat(["Hello there"], max_tokens=15)),
        Case("picture", _chat([_picture(0, 112, 56), "Describe."], max_tokens=15)),
        Case("picture, resized", _chat([_picture(1, 333, 197), "What is this?"], max_tokens=15)),
        Case(
            "two pictures with text between",
            _chat([_picture(2, 84, 140), "and", _picture(3, 224, 224), "?"], max_tokens=15),
        ),
        Case("the same picture twice", _chat([_picture(0, 112, 56)] * 2, max_tokens=8)),
        Case(
            "penalties and a seed",
            _chat(["Tell me"], max_tokens=24, seed=7, repetition_penalty=1.3, ignore_eos=True),
        ),
        Case(
            "biases and bad words",
            _chat(["Say"], max_tokens=12, logit_bias={"300": 5.0}, presence_penalty=0.5),
        ),
        Case("stop tokens", _chat(["Go on"], max_tokens=32, stop_token_ids=[10, 20, 30])),
        Case("a picture alone in a system's talk", _with_system([_picture(4, 70, 90)])),
    ]


def _chat(parts: list[str], **sampling: Any) -> dict[str, Any]:
    content = [_part(part) for part in parts]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0} | sampling


def _with_system(parts: list[str]) -> dict[str, Any]:
    chat = _chat(parts, max_tokens=15)
    chat["messages"].insert(0, {"role": "system", "content": "You are terse."})
    return chat


def _part(told: str) -> dict[str, Any]:
    if told.startswith("data:"):
        return {"type": "image_url", "image_url": {"url": told}}
    return {"type": "text", "text": told}


def _picture(seed: int, width: int, height: int) -> str:
    """Smooth colours, as in a photograph; every seed has its own."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
