"""No image is lost, overtaken, or kept waiting by a batch that had room for it."""

from hypothesis import given
from hypothesis import strategies as st

from shared.helpers.batch_queue import BatchQueue


@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_batches_are_runs_of_the_queue_within_the_limit(costs: list[int], max_cost: int) -> None:
    queue: BatchQueue[int] = BatchQueue(max_cost)
    for number, cost in enumerate(costs):
        queue.add(number, cost)
    items: list[int] = []
    while batch := queue.take():
        total = sum(costs[number] for number in batch)
        assert total <= max_cost or len(batch) == 1
        items += batch
        if len(items) < len(costs) and len(batch) > 1:
            assert total + costs[len(items)] > max_cost
    assert items == list(range(len(costs)))
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 30.0]), st.integers(1, 9))))
def test_items_of_an_earlier_turn_come_first(added: list[tuple[float, int]]) -> None:
    queue: BatchQueue[int] = BatchQueue(10)
    for number, (turn, cost) in enumerate(added):
        queue.add(number, cost, turn)
    taken: list[int] = []
    while batch := queue.take():
        taken += batch
    assert taken == sorted(range(len(added)), key=lambda number: added[number][0])
