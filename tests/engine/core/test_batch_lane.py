"""The rules of the batch lane, apart from the scheduler that asks for them."""

from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from workers.engine.core.batch_lane import RECENT_STEPS, BatchLane
from workers.engine.core.sequence import EngineRequest, Item, Sequence
from workers.engine.core.step_cost import StepCost, max_batch_tokens

BUDGET = 256


def batch_sequence(num_tokens: int, offsets: list[int]) -> Sequence:
    """A waiting sequence whose items, of one token each, begin at the offsets."""
    items = [Item("image", "i", PlaceholderRange(o, 1), {}) for o in offsets if o < num_tokens]
    request = EngineRequest("b", [*range(num_tokens)], items, SamplingParams(), lane="batch")
    return Sequence(request, 0, 0, [*range(num_tokens)], 9)


sequences = st.lists(
    st.builds(batch_sequence, st.integers(1, 60), st.lists(st.integers(0, 60), max_size=3)),
    max_size=20,
)


def measured(base_s: float, token_s: float) -> StepCost:
    cost = StepCost()
    for size in (1, 64, 200):
        cost.observe(size, base_s + size * token_s)
    return cost


def start_all(lane: BatchLane, waiting: list[Sequence]) -> list[int]:
    """Start the sequences that may start; return the numbers of their tokens."""
    started = []
    for sequence in waiting:
        if lane.may_start(sequence):
            num_tokens = min(sequence.num_tokens, lane.tokens_left(sequence))
            assert num_tokens > 0
            lane.spend_items(sequence, num_tokens)
            lane.spend_tokens(num_tokens)
            started.append(num_tokens)
    return started


@given(sequences, st.floats(0, 0.05), st.floats(1e-5, 1e-2), st.integers(0, 64))
def test_a_step_has_no_more_of_the_batch_lane_than_its_limit(
    waiting: list[Sequence], base_s: float, token_s: float, num_interactive: int
) -> None:
    cost = measured(base_s, token_s)
    lane = BatchLane(cost)
    lane.begin_step(BUDGET, 1, is_first=False)
    lane.begin_step(BUDGET, num_interactive, is_first=False)
    limit = max_batch_tokens(cost, num_interactive)
    assert limit is not None
    assert sum(start_all(lane, waiting)) <= limit


@given(sequences)
def test_the_batch_lane_has_the_whole_step_when_no_interactive_sequences_are_expected(
    waiting: list[Sequence],
) -> None:
    lane = BatchLane(measured(0.01, 0.001))
    for _ in range(RECENT_STEPS + 1):
        lane.begin_step(BUDGET, 0, is_first=True)
    num_left = BUDGET
    for num_tokens, sequence in zip(start_all(lane, waiting), waiting, strict=False):
        assert num_tokens == min(num_left, sequence.num_tokens)
        num_left -= num_tokens
