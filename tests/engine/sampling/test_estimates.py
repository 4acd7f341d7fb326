"""Estimates of masses, and tokens that are drawn by them."""

import pytest
import torch

from tests.engine.sampling.test_sampler import random_logits
from workers.engine.sampling.estimates import draw_unfiltered, estimate
from workers.engine.sampling.truncation import draw, to_units, unnormalized_probs

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS = 64


@pytest.fixture(params=[3_001, 50_000])
def vocab_size(request: pytest.FixtureRequest) -> int:
    """The first is no multiple of the size of a group."""
    size: int = request.param
    return size


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sums_are_within_the_error(vocab_size: int, spread: float, temperature: float) -> None:
    logits = spread * random_logits(5, NUM_ROWS, vocab_size)
    greatest, temperatures = logits.amax(-1, keepdim=True), torch.full((NUM_ROWS, 1), temperature)
    _, ends, error = estimate(logits, greatest, temperatures)
    exact = to_units(unnormalized_probs(logits, greatest, temperatures)).cumsum(-1)
    assert bool(((ends[:, -1:] - exact[:, -1:]).abs() <= error).all())
    assert bool(((ends[:, :-1] - exact[:, 31::32]).abs() <= error).all())
    assert bool((error <= ends[:, -1:] * 5e-6 + vocab_size).all())


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 50.0])
def test_tokens_equal_the_results_of_exact_sums(vocab_size: int, spread: float) -> None:
    logits = spread * random_logits(6, NUM_ROWS, vocab_size)
    logits[:3, 100:] = -torch.inf
    greatest, temperatures = logits.amax(-1, keepdim=True), torch.ones(NUM_ROWS, 1)
    points = torch.rand(NUM_ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    points[::8], points[1::8] = 0.0, 1 - 2.0**-52
    exact = draw(unnormalized_probs(logits, greatest, temperatures), points)
    assert draw_unfiltered(logits, greatest, temperatures, points).tolist() == exact.tolist()


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_a_point_at_the_end_of_a_token_is_decided_exactly(vocab_size: int, shift: int) -> None:
    logits = random_logits(8, NUM_ROWS, vocab_size)
    greatest, temperatures = logits.amax(-1, keepdim=True), torch.ones(NUM_ROWS, 1)
    weights = unnormalized_probs(logits, greatest, temperatures)
    ends = to_units(weights).cumsum(-1)
    tokens = torch.arange(NUM_ROWS)[:, None] * 40
    points = ((ends.gather(1, tokens) + shift).double() / ends[:, -1:])[:, 0]
    exact = draw(weights, points)
    assert draw_unfiltered(logits, greatest, temperatures, points).tolist() == exact.tolist()
