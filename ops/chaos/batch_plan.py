"""The batches of a run and their input files, which the settings determine in every process."""

import json
import random
from typing import Any, Literal

from msgspec import Struct

from ops.chaos.gateway_api import PATH
from ops.chaos.plan import IMAGES, MODEL, NUM_VARIANTS, WORDS, Batches, Settings, data_url

LINE, SINGLE = "batch_", "single-"
"""Beginnings of the ids of requests for lines, and for the same bodies alone."""
# Share of the lines that an endpoint refuses.
REFUSED = 0.03
NUM_LONG = 10
LONG_TOKENS = 400
# Share of the long lines in a batch that is cancelled or expires.
LONG = 0.3

Purpose = Literal["complete", "cancel", "expire"]
Body = dict[str, Any]


class PlannedBatch(Struct, frozen=True):
    """One batch, and what its client has in mind."""

    name: str
    tenant: str
    purpose: Purpose
    window: str
    content: bytes
    """The input file."""


def is_of_batches(request_id: str) -> bool:
    """Return whether a request belongs to the batches of a run, and not to its other clients."""
    return request_id.startswith((LINE, SINGLE))


def key_of(body: Body) -> str:
    """Return a text that is equal for equal bodies."""
    return json.dumps(body, sort_keys=True)


def make_bodies(settings: Settings, batches: Batches) -> tuple[list[Body], list[Body]]:
    """Return all different bodies of lines: short ones, and long ones."""
    rng = random.Random(f"bodies:{settings.seed}")
    short = [_make_body(rng, settings, batches) for _ in range(batches.questions)]
    num_long = NUM_LONG if batches.cancelled or batches.expired else 0
    long = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"long {number}"}],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "seed": 1,
        }
        for number in range(num_long)
    ]
    return short, long


def make_batches(settings: Settings, batches: Batches) -> list[PlannedBatch]:
    short, long = make_bodies(settings, batches)
    num_complete = batches.num - batches.cancelled - batches.expired
    tenants = settings.tenants or ("",)
    planned = []
    for number in range(batches.num):
        purpose: Purpose = "complete"
        if number >= num_complete:
            purpose = "cancel" if number < num_complete + batches.cancelled else "expire"
        rng = random.Random(f"batch:{settings.seed}:{number}")
        lines = []
        for index in range(batches.lines):
            bodies = long if purpose != "complete" and rng.random() < LONG else short
            line = {
                # Line separators of Unicode are no ends of lines.
                "custom_id": f"{number}/{index}\u2028{rng.randrange(100)}",
                "method": "POST",
                "url": PATH,
                "body": rng.choice(bodies),
            }
            lines.append(json.dumps(line, ensure_ascii=rng.random() < 0.5))
        content = "\n".join(lines).encode() + b"\n" * (number % 2)
        window = "1m" if purpose == "expire" else "1h"
        tenant = tenants[number % len(tenants)]
        planned.append(PlannedBatch(f"batch-{number}", tenant, purpose, window, content))
    return planned


def _make_body(rng: random.Random, settings: Settings, batches: Batches) -> Body:
    low, high = settings.max_tokens
    body: Body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": _content(rng, settings, batches)}],
        "max_tokens": rng.randint(low, high),
        "temperature": rng.choice([0.0, 0.8]),
        # The fake engine samples greedy answers as well.
        "seed": rng.randrange(2**31),
    }
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < REFUSED:
        body["temperature"] = -1.0
    return body


def _content(rng: random.Random, settings: Settings, batches: Batches) -> Any:
    text = " ".join(rng.choices(WORDS, k=rng.choice([3, 8, 20])))
    if rng.random() >= batches.images:
        return text
    path = rng.choice(sorted(path for path in IMAGES.iterdir() if path.suffix != ".json"))
    variant = str(rng.randrange(NUM_VARIANTS)) if settings.renderer == "fake" else ""
    image = {"type": "image_url", "image_url": {"url": data_url(path, variant)}}
    return [image, {"type": "text", "text": text}]
