"""Tenants take turns at the slots, and a caller that leaves keeps none."""

import asyncio
import contextlib

import pytest

from shared.errors import Overloaded
from shared.tenants.fair_turns import FairTurns


class Callers:
    """Callers that hold their slot until they are released."""

    def __init__(self, num_slots: int, max_held: int) -> None:
        self.began: list[str] = []
        self._slots = FairTurns(num_slots, "callers wait here")
        self._max_held = max_held
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def call(self, *names: str) -> None:
        """Start callers of the tenants that the first letters name."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name))
            await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await settle()

    async def _hold(self, name: str) -> None:
        async with self._slots.turn(name[0], self._max_held):
            self.began.append(name)
            await self._ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_flood_of_one_tenant_waits_while_others_take_their_turns() -> None:
    callers = Callers(2, 10)
    await callers.call("a1", "a2", "a3", "a4", "b1", "c1")
    assert callers.began == ["a1", "a2"]
    for name in ("a1", "a2", "a3", "b1"):
        await callers.end(name)
    assert callers.began == ["a1", "a2", "a3", "b1", "c1", "a4"]
    await callers.end("c1")
    await callers.end("a4")


async def test_over_the_limit_the_newest_of_the_heaviest_tenant_is_refused() -> None:
    callers = Callers(1, 3)
    await callers.call("a1", "a2", "a3", "b1")
    with pytest.raises(Overloaded, match="3 callers wait here"):
        await callers.end("a3")
    for name in ("a1", "a2", "b1"):
        await callers.end(name)
    assert callers.began == ["a1", "a2", "b1"]


async def test_a_caller_that_leaves_keeps_neither_slot_nor_place() -> None:
    callers = Callers(1, 2)
    await callers.call("a1", "a2")
    await callers.cancel("a2")
    await callers.call("a3")
    await callers.cancel("a1")
    assert callers.began == ["a1", "a3"]
    await callers.end("a3")
