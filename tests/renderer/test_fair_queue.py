"""FairQueue are fair, whoever comes and however often."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.renderer.fair_queue import FairQueue

MAX_HELD = 6
Waiter = tuple[str, int]


def test_tenants_have_turns_and_their_own_come_in_order() -> None:
    turns: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert turns.enter(waiter[0], waiter, MAX_HELD) is None
    assert [turns.next() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_the_newest_of_the_heaviest_goes() -> None:
    turns: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3", "a4", "b1", "b2"):
        turns.enter(waiter[0], waiter, MAX_HELD)
    assert turns.enter("a", "a5", MAX_HELD) == "a5"
    assert turns.enter("b", "b3", MAX_HELD) == "a4"
    assert turns.enter("b", "b4", MAX_HELD) == "b4"
    assert turns.enter("c", "c1", MAX_HELD) in ("a3", "b3")


def test_what_is_being_done_is_not_taken_back() -> None:
    turns: FairQueue[str] = FairQueue()
    for waiter in ("a1", "a2", "a3"):
        turns.enter("a", waiter, 3)
    assert [turns.next() for _ in range(3)] == ["a1", "a2", "a3"]
    assert turns.enter("b", "b1", 3) == "b1"
    turns.leave("a")
    assert turns.enter("b", "b1", 3) is None


STEPS = st.sampled_from(["enter", "enter", "next", "leave", "withdraw"])


@given(st.lists(st.tuples(STEPS, st.sampled_from("abcd"))))
def test_nobody_has_more_than_a_share_while_others_are_refused(
    steps: list[tuple[str, str]],
) -> None:
    turns: FairQueue[Waiter] = FairQueue()
    waiting: list[Waiter] = []
    working: list[Waiter] = []
    for number, (step, tenant) in enumerate(steps):
        if step == "enter":
            newcomer = (tenant, number)
            before = Counter(owner for owner, _ in waiting + working)
            gone = turns.enter(tenant, newcomer, MAX_HELD)
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
            found = turns.next()
            assert (found is None) == (not waiting)
            if found is not None:
                assert found == min(one for one in waiting if one[0] == found[0])
                waiting.remove(found)
                working.append(found)
        elif step == "leave" and working:
            turns.leave(working.pop()[0])
        elif step == "withdraw" and waiting:
            owner, _ = left = waiting.pop()
            turns.withdraw(owner, left)
        assert len(waiting) + len(working) <= MAX_HELD
