"""Simulated loads: bursty chats, one popular image, requests that share nothing."""

import json
import random
from collections.abc import Callable, Iterable
from datetime import datetime

from ops.simulate.engine import Link, Request

BURST = 3.0
"""In 5 of 25 seconds the rate is this times the mean."""
IMAGE_TOKENS = 1024
IMAGE_S = 0.04
# First numbers of the names of beginnings.
TEMPLATE, CHAT, IMAGE, QUESTION, SINGLE, ANSWER = range(6)


def bursty_chat(num_requests: int, rate: float, seed: int, gap_s: float = 0.0) -> list[Request]:
    """Chats of several turns, questions about popular images, single prompts; in bursts.

    With `gap_s`, no request arrives for this time in the middle.
    """
    rnd, requests, now_s = random.Random(seed), list[Request](), 0.0
    lengths = [rnd.randint(300, 1500) for _ in range(200)]
    templates = rnd.choices(range(200), [1 / (i + 1) for i in range(200)], k=num_requests)
    images = rnd.choices(range(4000), [1 / (i + 1) ** 0.8 for i in range(4000)], k=num_requests)
    for session in range(num_requests):
        factor = BURST if now_s % 25 >= 20 else (5 - BURST) / 4
        now_s += rnd.expovariate(rate / 2.49 * factor)
        kind, template = rnd.random(), templates[session]
        if kind < 0.45:
            requests += _chat(rnd, now_s, session, ((TEMPLATE, template), lengths[template]))
        elif kind < 0.75:
            template %= 20
            beginning = ((TEMPLATE, template), lengths[template])
            requests.append(_question(rnd, now_s, session, beginning, images[session]))
        else:
            requests.append(_single(rnd, now_s, session))
        if len(requests) >= 1.3 * num_requests:
            break
    requests.sort(key=lambda request: request.arrived_s)
    del requests[num_requests:]
    for request in requests[len(requests) // 2 :]:
        request.arrived_s += gap_s
    return requests


def bursts(num_requests: int, rate: float, seed: int, gap_s: float = 0.0) -> list[Request]:
    """Bursts of single prompts, 20 to 40 s long, with silences of `gap_s` on average."""
    rnd, requests, now_s = random.Random(seed), list[Request](), 0.0
    while len(requests) < num_requests:
        end_s = now_s + rnd.uniform(20, 40)
        while now_s < end_s:
            now_s += rnd.expovariate(rate)
            requests.append(_single(rnd, now_s, len(requests)))
        now_s += gap_s * rnd.uniform(0.5, 1.5)
    return requests[:num_requests]


def recorded(lines: Iterable[str]) -> list[Request]:
    """Return the requests of a log, from the lines `finished` of its engines; nothing is shared."""
    requests = list[Request]()
    for line in lines:
        fields = json.loads(line) if line.startswith("{") else {}
        if fields.get("event") == "finished" and "generated_tokens" in fields:
            ended_s = datetime.fromisoformat(fields["timestamp"]).timestamp()
            prompt, answer = fields["prompt_tokens"], max(1, fields["generated_tokens"])
            number = len(requests)
            chain = (((SINGLE, number), prompt), ((ANSWER, number), prompt + answer))
            requests.append(Request(ended_s - fields["age_ms"] / 1000, prompt, answer, chain))
    first_s = min(request.arrived_s for request in requests)
    for request in requests:
        request.arrived_s -= first_s
    return sorted(requests, key=lambda request: request.arrived_s)


def hot_image(num_requests: int, rate: float, seed: int) -> list[Request]:
    """Questions about one image, under one template."""
    rnd, requests, now_s = random.Random(seed), list[Request](), 0.0
    for session in range(num_requests):
        now_s += rnd.expovariate(rate)
        requests.append(_question(rnd, now_s, session, ((TEMPLATE, 0), 800), 0))
    return requests


def no_sharing(num_requests: int, rate: float, seed: int) -> list[Request]:
    """Single prompts without a common beginning."""
    rnd, requests, now_s = random.Random(seed), list[Request](), 0.0
    for session in range(num_requests):
        now_s += rnd.expovariate(rate)
        requests.append(_single(rnd, now_s, session))
    return requests


LOADS: dict[str, tuple[Callable[[int, float, int], list[Request]], float]] = {
    "bursty chat": (bursty_chat, 9.8),
    "one hot image": (hot_image, 20.0),
    "no sharing": (no_sharing, 5.0),
}
"""Loads by name, each with its requests a second and engine."""


def _chat(rnd: random.Random, at_s: float, session: int, beginning: Link) -> list[Request]:
    requests, chain, length = [], [beginning], beginning[1]
    for turn in range(min(12, 1 + int(rnd.expovariate(1 / 4)))):
        prompt = length + rnd.randint(20, 500)
        answer = 1 + int(rnd.lognormvariate(4.7, 0.7))
        length = prompt + answer
        chain.append(((CHAT, session, turn), length))
        requests.append(Request(at_s, prompt, answer, tuple(chain)))
        at_s += rnd.expovariate(1 / 6) + answer * 0.02
    return requests


def _question(
    rnd: random.Random, at_s: float, session: int, beginning: Link, image: int
) -> Request:
    (_, template), length = beginning
    prompt = length + IMAGE_TOKENS + rnd.randint(10, 80)
    answer = 1 + int(rnd.lognormvariate(4.2, 0.6))
    image_link = ((IMAGE, template, image), length + IMAGE_TOKENS)
    chain = (beginning, image_link, ((QUESTION, session), prompt + answer))
    return Request(at_s, prompt, answer, chain, IMAGE_S, IMAGE_TOKENS)


def _single(rnd: random.Random, at_s: float, session: int) -> Request:
    prompt = min(16_000, int(rnd.lognormvariate(6.8, 0.9)) + 50)
    answer = 1 + int(rnd.lognormvariate(4.9, 0.8))
    return Request(
        at_s, prompt, answer, (((SINGLE, session), prompt), ((ANSWER, session), prompt + answer))
    )
