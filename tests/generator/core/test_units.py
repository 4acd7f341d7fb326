"""The queue of units: batches of one shape, the urgent first, one unit of each request."""

from hypothesis import given
from hypothesis import strategies as st

from workers.generator.core.units import Unit, UnitQueue


def unit(request_id: str, dry_at_s: float = 0.0, shape: int = 1) -> Unit[str]:
    return Unit(request_id, shape, dry_at_s, f"work of {request_id}")


def queue(*units: Unit[str], max_batch: int = 8) -> UnitQueue[str]:
    unit_queue: UnitQueue[str] = UnitQueue(max_batch)
    for each in units:
        unit_queue.add(each)
    return unit_queue


def take_batch(waiting: UnitQueue[str]) -> list[str]:
    return [each.request_id for each in waiting.take()]


def test_the_client_that_runs_dry_first_is_served_first() -> None:
    waiting = queue(unit("late", 9.0), unit("soon", 1.0), unit("dry", -3.0), max_batch=1)
    assert [take_batch(waiting) for _ in range(4)] == [["dry"], ["soon"], ["late"], []]


def test_others_of_the_same_shape_share_the_batch_of_the_most_urgent() -> None:
    waiting = queue(unit("a", 1.0, 7), unit("b", 2.0, 5), unit("c", 3.0, 7), unit("d", 0.5, 7))
    assert take_batch(waiting) == ["d", "a", "c"]
    assert take_batch(waiting) == ["b"]


def test_a_batch_has_a_limit_and_takes_the_urgent_ones() -> None:
    waiting = queue(*(unit(f"r{n}", -n) for n in range(5)), max_batch=3)
    assert take_batch(waiting) == ["r4", "r3", "r2"]
    assert take_batch(waiting) == ["r1", "r0"]


def test_the_images_of_a_request_share_a_batch_and_are_cancelled_together() -> None:
    images = [Unit("a", 1, 0.0, f"image {number}", number) for number in range(3)]
    assert [each.work for each in queue(*images, unit("b"), max_batch=4).take()] == [
        "image 0",
        "image 1",
        "image 2",
        "work of b",
    ]
    waiting = queue(*images, unit("b"))
    waiting.discard(images[1])
    assert [each.number for each in waiting.cancel("a")] == [0, 2]
    assert take_batch(waiting) == ["b"]


def test_a_cancelled_unit_is_in_no_batch() -> None:
    waiting = queue(unit("a"), unit("b"))
    (cancelled,) = waiting.cancel("a")
    assert cancelled.work == "work of a"
    assert waiting.cancel("a") == []
    assert len(waiting) == 1
    assert take_batch(waiting) == ["b"]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3), st.tuples(st.floats(-9, 9), st.integers(1, 3))
    ),
    st.integers(1, 4),
)
def test_every_unit_is_in_one_batch_and_none_waits_for_a_less_urgent_one_of_its_shape(
    units: dict[str, tuple[float, int]], max_batch: int
) -> None:
    waiting = queue(*(unit(name, *about) for name, about in units.items()), max_batch=max_batch)
    order: list[str] = []
    while batch := waiting.take():
        assert len({each.shape for each in batch}) == 1
        rest = {name: about for name, about in units.items() if name not in order}
        assert units[batch[0].request_id][0] == min(dry_at_s for dry_at_s, _ in rest.values())
        order += [each.request_id for each in batch]
    assert sorted(order) == sorted(units)
    for shape in (1, 2, 3):
        urgencies = [units[name][0] for name in order if units[name][1] == shape]
        assert urgencies == sorted(urgencies)
