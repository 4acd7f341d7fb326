"""The queue is fair to tenants that send any number of requests."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.fair_queue import FairQueue

MAX_HELD = 6
Waiter = tuple[str, int]


def test_tenants_take_turns_and_each_one_is_served_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.add(waiter[0], waiter, MAX_HELD) is None
    assert [queue.start_next() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_the_newest_of_the_heaviest_goes() -> None:
    queue: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3", "a4", "b1", "b2"):
        queue.add(waiter[0], waiter, MAX_HELD)
    assert queue.add("a", "a5", MAX_HELD) == "a5"
    assert queue.add("b", "b3", MAX_HELD) == "a4"
    assert queue.add("b", "b4", MAX_HELD) == "b4"
    assert queue.add("c", "c1", MAX_HELD) in ("a3", "b3")


def test_a_started_waiter_is_not_rejected() -> None:
    queue: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3"):
        queue.add("a", waiter, 3)
    assert [queue.start_next() for _ in range(3)] == ["a1", "a2", "a3"]
    assert queue.add("b", "b1", 3) == "b1"
    queue.finish("a")
    assert queue.add("b", "b1", 3) is None


STEPS = st.sampled_from(["enter", "enter", "next", "leave", "withdraw"])


@given(st.lists(st.tuples(STEPS, st.sampled_from("abcd"))))
def test_no_tenant_holds_more_than_its_share_while_others_are_refused(
    steps: list[tuple[str, str]],
) -> None:
    queue: FairQueue[Waiter] = FairQueue()
    waiting: list[Waiter] = []
    working: list[Waiter] = []
    for number, (step, tenant) in enumerate(steps):
        if step == "enter":
            newcomer = (tenant, number)
            before = Counter(owner for owner, _ in waiting + working)
            gone = queue.add(tenant, newcomer, MAX_HELD)
            waiting.append(newcomer)
            assert (gone is not None) == (before.total() == MAX_HELD)
            if gone is not None:
                waiting.remove(gone)
                removable = [before[owner] for owner, _ in waiting]
                if gone == newcomer:
                    assert max(removable, default=0) <= before[tenant] + 1
                else:
                    assert before[gone[0]] == max([*removable, before[gone[0]]])
                    assert before[gone[0]] > before[tenant] + 1
        elif step == "next":
            next_waiter = queue.start_next()
            assert (next_waiter is None) == (not waiting)
            if next_waiter is not None:
                assert next_waiter == min(
                    waiter for waiter in waiting if waiter[0] == next_waiter[0]
                )
                waiting.remove(next_waiter)
                working.append(next_waiter)
        elif step == "leave" and working:
            queue.finish(working.pop()[0])
        elif step == "withdraw" and waiting:
            owner, _ = left = waiting.pop()
            queue.withdraw(owner, left)
        assert len(waiting) + len(working) <= MAX_HELD
