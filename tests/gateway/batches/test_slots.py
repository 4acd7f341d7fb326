"""Slots of lines in flight: shares of tenants, windows, and callers that give up."""

import asyncio
import math
import random
from collections import defaultdict
from dataclasses import dataclass

import pytest

from workers.gateway.batches.slots import MIN_SLOTS, LineSlots, num_slots

STEP_S = 0.25
WAITING = 64
"""Lines of a batch that wait at one time."""


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """A line that waits for a slot, and holds it until `end`."""

    def __init__(self, slots: LineSlots, tenant: str, deadline_s: int = 1, model: str = "m"):
        self.has_slot = False
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, model, tenant, deadline_s))

    async def _hold(self, slots: LineSlots, model: str, tenant: str, deadline_s: int) -> None:
        async with slots.slot(model, tenant, deadline_s):
            self.has_slot = True
            await self._ended.wait()

    def end(self) -> None:
        self._ended.set()


@dataclass
class Work:
    """Lines of one tenant's batches. Each holds its slot for `line_s`."""

    tenant: str
    line_s: float
    deadlines: list[int]


async def shares_of(
    weights: dict[str, float], works: list[Work], num_slots: int, *, until_s: float
) -> dict[str, float]:
    """Return each tenant's share of the slots' time, for batches that never run dry."""
    now_s, rng = 0.0, random.Random(0)
    slots = LineSlots(weights)
    slots.set_limit("m", num_slots)
    waiting = {
        (work.tenant, deadline): [Holder(slots, work.tenant, deadline) for _ in range(WAITING)]
        for work in works
        for deadline in work.deadlines
    }
    line_s = {work.tenant: work.line_s for work in works}
    held: list[tuple[float, str, int, Holder]] = []
    used: defaultdict[str, float] = defaultdict(float)
    while now_s < until_s:
        await settle()
        for (tenant, deadline), lines in waiting.items():
            for line in [line for line in lines if line.has_slot]:
                lines.remove(line)
                lines.append(Holder(slots, tenant, deadline))
                seconds = line_s[tenant] * rng.uniform(0.5, 1.5)
                # Lines that end in the same step of an engine end at the same time.
                end_s = math.ceil((now_s + seconds) / STEP_S) * STEP_S
                used[tenant] += min(end_s, until_s) - now_s
                held.append((end_s, tenant, deadline, line))
        assert len(held) == num_slots
        now_s = min(end_s for end_s, *_ in held)
        for place in [place for place in held if place[0] == now_s]:
            held.remove(place)
            place[-1].end()
    for line in [place[-1] for place in held] + [
        line for each in waiting.values() for line in each
    ]:
        line.task.cancel()
    return {tenant: seconds / sum(used.values()) for tenant, seconds in used.items()}


@pytest.mark.parametrize("num_slots", [8, 11, 64, 128])
@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), (1.0, 1.0, 1.0), (10.0, 1.0, 1.0)])
async def test_ten_batches_of_three_tenants_share_by_weight(
    num_slots: int, weights: tuple[float, ...]
) -> None:
    tenants = dict(zip("abc", weights, strict=True))
    # The tenants differ in their batches, in the windows of these, and in the time of their lines.
    works = [
        Work("a", 1.0, [9]),
        Work("b", 4.0, [5, 6, 7]),
        Work("c", 2.0, [1, 2, 3, 4, 8, 10]),
    ]
    shares = await shares_of(tenants, works, num_slots, until_s=150.0)
    for tenant, weight in tenants.items():
        assert shares[tenant] == pytest.approx(weight / sum(weights), rel=0.1)


async def test_a_tenant_that_comes_later_does_not_wait_behind_others() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 4)
    early = [Holder(slots, "early", 1) for _ in range(WAITING)]
    await settle()
    late = [Holder(slots, "late", 9) for _ in range(3)]
    for _ in range(2):
        next(line for line in early if line.has_slot and not line._ended.is_set()).end()
        await settle()
    assert [line.has_slot for line in late] == [True, True, False]
    for line in (*early, *late):
        line.task.cancel()


async def test_a_tenant_without_lines_saves_nothing_for_later() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 4)
    busy = [Holder(slots, "busy") for _ in range(WAITING)]
    await settle()
    back = [Holder(slots, "back") for _ in range(WAITING)]
    for _ in range(20):
        for line in [line for line in (*busy, *back) if line.has_slot]:
            line.end()
        await settle()
    num_ended = [sum(line.has_slot for line in lines) for lines in (busy, back)]
    assert num_ended[1] == pytest.approx(num_ended[0] - 4, abs=4)
    for line in (*busy, *back):
        line.task.cancel()


async def test_a_model_without_workers_gets_some_lines() -> None:
    slots = LineSlots({})
    lines = [Holder(slots, "t") for _ in range(20)]

    def num_begun() -> int:
        return sum(line.has_slot for line in lines)

    await settle()
    assert num_begun() == MIN_SLOTS == slots.num_held
    slots.set_limit("m", 12)
    await settle()
    assert num_begun() == 12
    slots.set_limit("m", 2)
    for line in lines[:10]:
        line.end()
    await settle()
    assert num_begun() == 12
    lines[10].end()
    await settle()
    assert num_begun() == 13
    assert slots.num_held == 2
    for line in lines:
        line.task.cancel()


async def test_the_batch_whose_window_ends_first_is_first() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    first = Holder(slots, "t", 1)
    await settle()
    late, early = Holder(slots, "t", 9), Holder(slots, "t", 5)
    await settle()
    first.end()
    await settle()
    assert early.has_slot
    assert not late.has_slot
    for line in (late, early):
        line.task.cancel()


async def test_a_caller_that_gives_up_leaves_its_slot_to_others() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    holder = Holder(slots, "t")
    await settle()
    first, second = Holder(slots, "t"), Holder(slots, "t")
    await settle()
    # The slot is assigned before the cancelled caller runs again, and after.
    holder.end()
    await asyncio.sleep(0)
    first.task.cancel()
    await settle()
    assert not first.has_slot
    assert second.has_slot
    third = Holder(slots, "t")
    await settle()
    third.task.cancel()
    second.end()
    await settle()
    assert slots.num_held == 0


async def test_models_have_separate_slots() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    slots.set_limit("other", 1)
    lines = [Holder(slots, "t"), Holder(slots, "t", model="other")]
    await settle()
    assert slots.num_held == 2
    for line in lines:
        line.task.cancel()


def test_batchers_share_the_slots_by_their_batches() -> None:
    alone = num_slots(num_sequences=64, num_batches=1, num_elsewhere=0)
    assert alone == 128
    # Batchers without batches have no part, however many there are.
    assert num_slots(64, num_batches=5, num_elsewhere=0) == alone
    assert num_slots(64, num_batches=1, num_elsewhere=3) == alone // 4
    assert num_slots(64, num_batches=3, num_elsewhere=1) == 3 * alone // 4
    assert num_slots(64, num_batches=0, num_elsewhere=1) == alone // 2
    assert num_slots(0, num_batches=1, num_elsewhere=0) == MIN_SLOTS
