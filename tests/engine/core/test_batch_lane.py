"""The rules of the batch lane, apart from the scheduler that asks for them.

The steps of these tests take exactly the time that the rules expect of them.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from workers.engine.core.batch_lane import EXPECTED_S, LEAST_EXTRA_STEPS, MAX_LEAST_STEPS, BatchLane
from workers.engine.core.sequence import EngineRequest, Item, Sequence
from workers.engine.core.step_cost import MIN_CHUNK, StepCost, StepWork

slowdowns = st.floats(1.02, 4)


class Machine:
    """A machine that computes some tokens in the time in which it reads its weights."""

    def __init__(self, base_s: float, token_s: float, graph_s: float, item_s: float) -> None:
        """`graph_s` is the time that steps without prompts save, and `item_s` is for a token."""
        self.item_s = item_s
        self.times = base_s, token_s, graph_s
        self.cost = StepCost()
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            self.cost.observe(StepWork(size), self.seconds(StepWork(size)))
        for size in (1, 4, 16, 64, 256):
            self.cost.observe(StepWork(0, size), self.seconds(StepWork(0, size)))
        self.cost.observe(StepWork(16, 0, 1), self.seconds(StepWork(16)) + item_s)

    def seconds(self, work: StepWork) -> float:
        base_s, token_s, graph_s = self.times
        saved_s = 0 if work.num_prompt_tokens else min(graph_s, base_s / 2)
        return max(base_s, token_s * work.num_tokens) - saved_s


machines = st.builds(
    Machine, st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(0, 0.05), st.floats(0, 0.2)
)


def batch_sequence(num_prompt: int, max_tokens: int, offsets: list[int]) -> Sequence:
    """A sequence whose items, of one token each, begin at the offsets."""
    offsets = sorted({offset for offset in offsets if offset < num_prompt})
    items = [Item("image", "i", PlaceholderRange(offset, 1), {}) for offset in offsets]
    request = EngineRequest("b", [*range(num_prompt)], items, SamplingParams(), lane="batch")
    return Sequence(request, 0, 0, [*range(num_prompt)], max_tokens)


sequences = st.lists(
    st.builds(
        batch_sequence,
        st.integers(1, 200),
        st.integers(1, 20),
        st.lists(st.integers(0, 200), max_size=2),
    ),
    min_size=1,
    max_size=12,
)
works = st.builds(StepWork, st.integers(1, 40), st.sampled_from([0, 0, 0, 50]))


class Step:
    """Work of the batch lane in one step: decodes first, then prompts, each in order."""

    def __init__(self, lane: BatchLane, interactive: StepWork, batch: list[Sequence]) -> None:
        self.num_decodes = self.num_prompt_tokens = self.num_items = 0
        lane.begin_step(interactive)
        decodes = [s for s in batch if s.num_uncomputed_tokens == 1 and s.num_computed_tokens]
        given_tokens = {}
        for sequence in (*decodes, *(s for s in batch if s not in decodes)):
            if not lane.may_start(sequence):
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, lane.tokens_left(sequence))
            lane.add(sequence, num_tokens)
            given_tokens[sequence] = num_tokens
            self.num_items += sum(start < num_tokens for start, _ in sequence.items_ahead())
            if sequence.num_uncomputed_tokens > 1:
                self.num_prompt_tokens += num_tokens
            else:
                self.num_decodes += num_tokens
        lane.end_step()
        for sequence, num_tokens in given_tokens.items():
            if num_tokens == sequence.num_uncomputed_tokens:
                sequence.token_ids.append(0)
            sequence.num_computed_tokens += num_tokens


def run(
    machine: Machine, slowdown: float, interactive: list[StepWork], batch: list[Sequence]
) -> tuple[list[float], list[float]]:
    """Run steps with this interactive work; return their times with the batch lane and without."""
    lane, times, alone = BatchLane(machine.cost, slowdown), [], []
    for work in interactive:
        batch = [s for s in batch if s.num_output_tokens < s.max_tokens]
        step = Step(lane, work, batch)
        took_s = machine.cost.seconds(
            step.num_decodes + work.num_decodes, step.num_prompt_tokens + work.num_prompt_tokens
        )
        times.append(took_s + step.num_items * machine.item_s)
        alone.append(machine.cost.seconds(work.num_decodes, work.num_prompt_tokens))
        lane.observe(times[-1])
    return times, alone


@given(machines, slowdowns, st.lists(works, min_size=1, max_size=60), sequences)
def test_interactive_steps_together_take_no_longer_than_the_slowdown(
    machine: Machine, slowdown: float, interactive: list[StepWork], batch: list[Sequence]
) -> None:
    times, alone = run(machine, slowdown, interactive, batch)
    for num_steps in range(1, len(times) + 1):
        assert sum(times[:num_steps]) <= slowdown * sum(alone[:num_steps]) * 1.001


@given(
    st.builds(Machine, st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.just(0), st.just(0)),
    slowdowns,
    st.lists(works, min_size=1, max_size=60),
    sequences,
)
def test_a_step_without_items_takes_no_longer_than_the_slowdown_and_one_token(
    machine: Machine, slowdown: float, interactive: list[StepWork], batch: list[Sequence]
) -> None:
    for took_s, alone_s in zip(*run(machine, slowdown, interactive, batch), strict=True):
        assert took_s <= (slowdown * alone_s + machine.times[1]) * 1.001


@given(machines, st.floats(1.1, 4), works, sequences)
def test_the_batch_lane_does_not_starve(
    machine: Machine, slowdown: float, work: StepWork, batch: list[Sequence]
) -> None:
    """Its sequences end although each step has interactive sequences."""
    lane = BatchLane(machine.cost, slowdown)
    alone_s = machine.cost.seconds(work.num_decodes, work.num_prompt_tokens)
    # If each token and each item had a separate step.
    num_tokens = sum(s.num_prompt_tokens + s.max_tokens for s in batch)
    num_items = sum(len(s.request.items) for s in batch)
    most_s = num_tokens * sum(machine.times) + num_items * machine.item_s
    left = math.ceil(3 * most_s / ((slowdown - 1) * alone_s)) + 2 * num_tokens + 2
    while batch:
        Step(lane, work, batch)
        batch = [s for s in batch if s.num_output_tokens < s.max_tokens]
        left -= 1
        assert left > 0


@given(machines, slowdowns)
def test_a_first_token_does_not_wait_for_the_batch_lane(machine: Machine, slowdown: float) -> None:
    lane = BatchLane(machine.cost, slowdown)
    lane.begin_step(StepWork(3))
    lane.end_step()
    lane.begin_step(StepWork(3, 40))
    assert not lane.may_start(batch_sequence(20, 1, []))
    lane.end_step()
    # The next chunks of long prompts share their steps.
    lane.begin_step(StepWork(3, 400))
    assert lane.may_start(batch_sequence(1, 1, [])) or slowdown < 1 + 1 / 400


@given(machines, slowdowns, st.integers(0, 5))
def test_a_batch_alone_uses_the_machine(machine: Machine, slowdown: float, num_past: int) -> None:
    """No step is much longer than needed for it, because an interactive request may come."""
    lane = BatchLane(machine.cost, slowdown)
    for _ in range(num_past):
        lane.begin_step(StepWork(1, 30))
        lane.end_step()
        lane.observe(EXPECTED_S + 1)
    lane.begin_step(StepWork())
    longest_s = MAX_LEAST_STEPS * machine.cost.least_s
    num_tokens = lane.tokens_left(batch_sequence(10**5, 1, []))
    assert num_tokens >= MIN_CHUNK
    if num_tokens > MIN_CHUNK:
        took_s = machine.cost.seconds(0, num_tokens)
        assert took_s == pytest.approx(longest_s, rel=0.01, abs=machine.times[1])
    assert lane.may_start(batch_sequence(1, 1, [0]))


@given(machines, slowdowns)
def test_steps_between_interactive_requests_are_short(machine: Machine, slowdown: float) -> None:
    lane = BatchLane(machine.cost, slowdown)
    lane.begin_step(StepWork(1, 63))
    lane.end_step()
    lane.observe(1.0)
    lane.begin_step(StepWork())
    num_tokens = lane.tokens_left(batch_sequence(10**5, 1, []))
    first_s = machine.cost.seconds(1, 63)
    least_s = (1 + LEAST_EXTRA_STEPS * (slowdown - 1)) * machine.cost.least_s
    longest_s = max((slowdown - 1) * first_s, least_s)
    assert num_tokens >= MIN_CHUNK
    if num_tokens > MIN_CHUNK:
        assert machine.cost.seconds(0, num_tokens) <= longest_s * 1.001


def test_there_is_no_limit_before_a_step_was_measured() -> None:
    lane = BatchLane(StepCost(), 1.25)
    for work in (StepWork(1), StepWork()):
        lane.begin_step(work)
        assert lane.tokens_left(batch_sequence(5000, 1, [0, 9])) == 5000
        lane.end_step()
