"""No image is lost, overtaken, or kept waiting by a batch that had room for it."""

from hypothesis import given
from hypothesis import strategies as st

from workers.encoder.batches import BatchQueue


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
