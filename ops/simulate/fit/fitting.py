"""Fits the simulator to a part of a run, and compares it with the rest of the run. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ops.simulate.engine import Cost
from ops.simulate.fit.fitted import WINDOW_S, Fit, FittedSimulation, Samples, is_judged
from ops.simulate.fit.measurement import Answer, Kind, Step
from ops.simulate.simulation import quantile

TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of the run and of the simulator."""

    name: str
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured if self.measured else 1.0

    @property
    def is_close(self) -> bool:
        return abs(self.ratio - 1.0) <= TOLERANCE


def fit(answers: Sequence[Answer], steps: Sequence[Step], limits: Cost) -> Fit:
    """Return what the fitted windows of a run say."""
    steps = [step for step in steps if not is_judged(step.began_s)]
    answers = [answer for answer in answers if not is_judged(answer.sent_s)]
    cost = fit_cost(steps, limits)
    return Fit(
        cost,
        {kind: Samples(values) for kind, values in _slowdowns(steps, cost).items()},
        Samples((answer.sent_s, answer.before_s) for answer in answers),
        Samples((answer.sent_s, answer.after_s) for answer in answers),
    )


def _slowdowns(steps: Sequence[Step], cost: Cost) -> dict[Kind, list[tuple[float, float]]]:
    """Return when steps of each kind took how many times longer than they cost.

    A leap of the simulator is many steps without prefills. So these have their mean in a window.
    """
    parts = defaultdict[tuple[Kind, float], list[Step]](list)
    for step in steps:
        at_s = step.began_s if step.prefills else step.began_s // WINDOW_S * WINDOW_S
        parts[step.kind, at_s].append(step)
    found = defaultdict[Kind, list[tuple[float, float]]](list)
    for (kind, at_s), part in parts.items():
        took_s = sum(step.took_s for step in part)
        found[kind].append((at_s, took_s / sum(predict_s(cost, step) for step in part)))
    return found


def fit_cost(steps: Sequence[Step], limits: Cost) -> Cost:
    """Return `limits` with the costs that explain processor times best; none is negative."""
    seconds = np.array([step.cpu_s for step in steps])
    # A long time varies more than a short one: its error counts less, by its root.
    weights = 1.0 / np.sqrt(seconds)
    columns = np.array([[1.0, step.tokens, step.context] for step in steps]) * weights[:, None]
    best, least = np.zeros(3), float("inf")
    # A negative coefficient is left out. With three, all choices of columns can be tried.
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(columns[:, chosen], seconds * weights)
            error = float(np.sum((columns[:, chosen] @ found - seconds * weights) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    step_s, token_s, context_s = map(float, best)
    return replace(limits, step_s=step_s, token_s=token_s, context_s=context_s)


def predict_s(cost: Cost, step: Step) -> float:
    return cost.step_s + cost.token_s * step.tokens + cost.context_s * step.context


def explained(steps: Sequence[Step], cost: Cost) -> float:
    """Return the part of the variance of processor times that the cost explains."""
    seconds = np.array([step.cpu_s for step in steps])
    told = np.array([predict_s(cost, step) for step in steps])
    return float(1.0 - np.sum((seconds - told) ** 2) / np.sum((seconds - seconds.mean()) ** 2))


def compare(
    answers: Sequence[Answer], fitted: Fit, num_engines: int, block: int, seed: int
) -> Iterator[Comparison]:
    """Yield figures of the judged windows, of the run and of the simulator."""
    simulation = FittedSimulation(answers, fitted, num_engines, block, seed)
    simulated = simulation.run()
    judged = [answer for answer in answers if is_judged(answer.sent_s)]
    hits = sum(answer.cached_tokens for answer in judged)
    prompts = sum(len(answer.turn.token_ids) for answer in judged)
    yield Comparison("prompt tokens from cache", hits / prompts, simulated.hit_rate)
    measured_s = [answer.ttft_s for answer in judged]
    for name, part in (("TTFT p50", 0.5), ("TTFT p90", 0.9), ("TTFT p99", 0.99)):
        yield Comparison(name, quantile(measured_s, part), quantile(simulated.ttft_s, part))
    measured_s = [answer.ended_s - answer.sent_s for answer in judged]
    yield Comparison("answer p50", quantile(measured_s, 0.5), quantile(simulated.answer_s, 0.5))
    ended_s = max(answer.ended_s for answer in answers)
    num = len(answers)
    yield Comparison("answers a second", num / ended_s, num / simulation.now_s)
