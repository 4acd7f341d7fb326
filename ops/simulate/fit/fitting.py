"""Fits the simulator's cost to measured steps, and compares the simulator with the run. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from ops.simulate.engine import Cost
from ops.simulate.fit.trace import Turn, to_request
from ops.simulate.routers import SharedQueue
from ops.simulate.simulation import Simulation, quantile

Step = tuple[int, int, float]
"""Tokens, context of the decoding sequences, and seconds of a step."""
TOLERANCE = 0.2
WARM = 5
"""One of so many requests warms the caches, and is not counted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one request."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of the run and of the simulator."""

    name: str
    measured: float
    simulated: float

    @property
    def deviation(self) -> float:
        return self.simulated / self.measured - 1.0 if self.measured else 0.0

    @property
    def is_close(self) -> bool:
        return abs(self.deviation) <= TOLERANCE


def fit_cost(steps: Sequence[Step], limits: Cost) -> Cost:
    """Return `limits` with the costs that explain the steps best; none of them is negative."""
    columns = np.array([[1.0, tokens, context] for tokens, context, _ in steps])
    seconds = np.array([step_s for _, _, step_s in steps])
    best, least = np.zeros(3), float("inf")
    # A negative coefficient is left out. With three, all choices of columns can be tried.
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(columns[:, chosen], seconds)
            error = float(np.sum((columns[:, chosen] @ found - seconds) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    step_s, token_s, context_s = map(float, best)
    return Cost(
        step_s,
        token_s,
        context_s,
        limits.max_seqs,
        limits.step_tokens,
        limits.kv_tokens,
    )


def explained(steps: Sequence[Step], cost: Cost) -> float:
    """Return the part of the variance of step times that the cost explains."""
    seconds = np.array([step_s for _, _, step_s in steps])
    told = [cost.step_s + cost.token_s * t + cost.context_s * c for t, c, _ in steps]
    return float(1.0 - np.sum((seconds - told) ** 2) / np.sum((seconds - seconds.mean()) ** 2))


def overhead_s(alone: Sequence[tuple[Turn, Answer]], cost: Cost) -> float:
    """Return the time to a first token outside of steps, from requests that were alone."""
    outside = [
        answer.ttft_s - cost.step_s - cost.token_s * len(turn.token_ids) for turn, answer in alone
    ]
    # Less than nothing: the steps under load took longer for another reason than their tokens.
    return max(0.0, median(outside))


def compare(
    turns: Sequence[Turn],
    answers: Sequence[Answer],
    cost: Cost,
    extra_s: float,
    num_engines: int,
    block: int,
) -> Iterator[Comparison]:
    """Yield the figures of the run and those of the simulator for the same requests."""
    requests = [to_request(turn, turn.at_s, block) for turn in turns]
    simulated = Simulation(requests, SharedQueue(), num_engines, 1, cost=cost).run()
    counted = answers[len(answers) // WARM :]
    hits = sum(answer.cached_tokens for answer in counted)
    prompts = sum(answer.prompt_tokens for answer in counted)
    yield Comparison("prompt tokens from cache", hits / prompts, simulated.hit_rate)
    ttft_s = [answer.ttft_s for answer in counted]
    for name, part in (("TTFT p50", 0.5), ("TTFT p99", 0.99)):
        yield Comparison(
            name, quantile(ttft_s, part), round(quantile(simulated.ttft_s, part) + extra_s, 3)
        )
