"""Slots of lines in flight: shares of tenants, windows, and callers that give up."""

import asyncio
from collections import Counter

from workers.gateway.batches.slots import MIN_SLOTS, LineSlots, num_slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(slots: LineSlots, tenant: str, deadline_s: int = 1) -> asyncio.Task[None]:
    return asyncio.create_task(slots.acquire("m", tenant, deadline_s))


async def test_a_model_without_workers_gets_some_lines() -> None:
    slots = LineSlots({})
    tasks = [waiting(slots, "t") for _ in range(20)]
    await settle()
    assert sum(task.done() for task in tasks) == MIN_SLOTS == slots.num_held
    slots.set_limit("m", 12)
    await settle()
    assert sum(task.done() for task in tasks) == 12
    slots.set_limit("m", 2)
    for _ in range(10):
        slots.release("m", "t")
    await settle()
    assert sum(task.done() for task in tasks) == 12
    slots.release("m", "t")
    await settle()
    assert sum(task.done() for task in tasks) == 13
    assert slots.num_held == 2
    for task in tasks:
        task.cancel()


async def test_tenants_share_the_slots_by_their_weights() -> None:
    slots = LineSlots({"heavy": 3.0})
    slots.set_limit("m", 16)
    held: Counter[str] = Counter()

    async def run(tenant: str) -> None:
        while True:
            await slots.acquire("m", tenant, 1)
            held[tenant] += 1
            for _ in range(7):
                await asyncio.sleep(0)
            slots.release("m", tenant)

    tasks = [asyncio.create_task(run(t)) for t in ("heavy", "light") for _ in range(40)]
    for _ in range(2000):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert 2.7 < held["heavy"] / held["light"] < 3.3


async def test_the_batch_whose_window_ends_first_is_first() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    await slots.acquire("m", "t", 1)
    late, early = waiting(slots, "t", 9), waiting(slots, "t", 5)
    await settle()
    slots.release("m", "t")
    await settle()
    assert early.done()
    assert not late.done()
    late.cancel()


async def test_a_caller_that_gives_up_leaves_its_slot_to_others() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    await slots.acquire("m", "t", 1)
    first, second = waiting(slots, "t"), waiting(slots, "t")
    await settle()
    # The slot is assigned before the cancelled caller runs again, and after.
    slots.release("m", "t")
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
    third = waiting(slots, "t")
    await settle()
    third.cancel()
    slots.release("m", "t")
    await settle()
    assert slots.num_held == 0


async def test_models_have_separate_slots() -> None:
    slots = LineSlots({})
    slots.set_limit("m", 1)
    slots.set_limit("other", 1)
    await slots.acquire("m", "t", 1)
    await slots.acquire("other", "t", 1)
    assert slots.num_held == 2


def test_batchers_share_the_slots_by_their_batches() -> None:
    alone = num_slots(num_sequences=64, num_batches=1, num_elsewhere=0)
    assert alone == 128
    # Batchers without batches have no part, however many there are.
    assert num_slots(64, num_batches=5, num_elsewhere=0) == alone
    assert num_slots(64, num_batches=1, num_elsewhere=3) == alone // 4
    assert num_slots(64, num_batches=3, num_elsewhere=1) == 3 * alone // 4
    assert num_slots(64, num_batches=0, num_elsewhere=1) == alone // 2
    assert num_slots(0, num_batches=1, num_elsewhere=0) == MIN_SLOTS
