"""Workloads that no decision was tuned on: arrivals of mixed lengths, sampled requests, long
prompts, several images in a request. Pure but for the files of images.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.gateway.transports import Prepared, Times
from ops.bench.peers.protocol import Request
from ops.bench.peers.workloads import Maker
from ops.harness.samples import Samples

NUM_ARRIVALS, ARRIVALS_PER_S = 64, 8.0
PROMPT_LENS, ANSWER_LENS = (16, 1024), (8, 256)
NUM_SAMPLED = 32
NUM_DECODES, DECODE_LEN = 16, 128
# Sides in pixels of the images of each request.
IMAGE_SIDES = (
    (224, 448, 336, 560),
    (448, 280, 672, 224),
    (336, 336, 504, 448),
    (560, 224, 392, 448),
)
# Every fourth sampled request has a grammar, of an answer without an end.
GRAMMAR_EVERY = 4
GRAMMAR = {"structured_outputs": {"regex": "[a-z ]+"}}
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    after_s: float
    """Seconds from the beginning of the workload."""
    prepared: Prepared


def poisson(maker: Maker, rng: random.Random) -> list[Arrival]:
    """Arrivals at random times, with lengths from short to long in equal shares of their logs."""
    arrivals, now_s = [], 0.0
    for _ in range(NUM_ARRIVALS):
        now_s += rng.expovariate(ARRIVALS_PER_S)
        prompt, answer = (round(_between(rng, *limits)) for limits in (PROMPT_LENS, ANSWER_LENS))
        arrivals.append(Arrival(now_s, Prepared(Request(answer, maker.token_ids(prompt)))))
    return arrivals


def sampled(maker: Maker) -> list[Arrival]:
    """Requests at once, with top_p, top_k and penalties, and some with a grammar."""
    return [
        Arrival(0.0, Prepared(Request(64, maker.token_ids(64)), fields=_fields(number)))
        for number in range(NUM_SAMPLED)
    ]


def long_prompt(maker: Maker, length: int, max_model_len: int) -> Arrival:
    """A prompt of a length, or of as many tokens as the model takes."""
    length = min(length, max_model_len - 8)
    return Arrival(0.0, Prepared(Request(8, maker.token_ids(length))))


def images(maker: Maker) -> list[Arrival]:
    """Requests at once, with four images of several sizes each."""
    return [
        Arrival(0.0, Prepared.with_images(Request(32, text=maker.text()), files))
        for files in ([maker.image(side) for side in sides] for sides in IMAGE_SIDES)
    ]


def decodes(maker: Maker) -> list[Arrival]:
    return [
        Arrival(0.0, Prepared(Request(DECODE_LEN, maker.token_ids(32)))) for _ in range(NUM_DECODES)
    ]


def figures(times: Sequence[Times], num_tokens: int, took_s: float) -> Iterator[tuple[str, float]]:
    """Figures of a workload by name; a name ends with `_s` where less is better."""
    first_s = Samples(each.first_s for each in times)
    yield "tokens per second", num_tokens / took_s
    yield "first token p50_s", first_s.median
    if len(first_s) > 1:
        yield "first token p95_s", first_s.p95
        yield "longest gap p50_s", Samples(each.gap_s for each in times).median


def gaps(times: Sequence[Times]) -> Iterator[tuple[str, float]]:
    """Figures of the times between the events of decodes."""
    gaps_s = Samples(gap for each in times for gap in each.gaps_s)
    yield "longest gap of decodes p50_s", Samples(each.gap_s for each in times).median
    yield "gap of decodes p99_s", gaps_s.p99
    yield "gap p99 to its median_s", gaps_s.p99 / gaps_s.median


def ratio(name: str, mine: float, theirs: float) -> float:
    """Return the factor by which our figure is better; below 1 it is worse."""
    return theirs / mine if name.endswith("_s") else mine / theirs


def _fields(number: int) -> dict[str, Any]:
    grammar = GRAMMAR if number % GRAMMAR_EVERY == 0 else {}
    return {**SAMPLING, "seed": number, **grammar}


def _between(rng: random.Random, least: int, most: int) -> float:
    """A number of equal probability in each octave."""
    return float(least * (most / least) ** rng.random())
