"""Logs of steps: fenced appends, and followers."""

import asyncio
import secrets

import pytest
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import Answered, Asked, Begun, Ended, Listed, Sending, ServerUse
from shared.state.step_log import StepLog, open_log

BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi")], {})


def new_id() -> str:
    return f"resp_{secrets.token_hex(8)}"


async def test_one_of_two_writers_continues_and_the_other_reads_its_step(bus: Bus) -> None:
    name = new_id()
    log, other = StepLog(bus, "t", name), StepLog(bus, "t", name)
    await log.append(BEGUN)
    await other.refresh()
    await log.append(Asked(0, 0))
    with pytest.raises(Fenced):
        await other.append(Ended(0, "cancelled", 2))
    assert other.state.num_steps == 2
    other.overtaken = False
    await other.append(Ended(0, "cancelled", 2))
    # Nobody finds a response of another tenant.
    assert (await open_log(bus, "other", name)).state.num_steps == 0


async def test_a_writer_does_not_take_anothers_call_for_its_own(bus: Bus) -> None:
    name = new_id()
    logs = [StepLog(bus, "t", name) for _ in range(2)]
    called = FunctionCall("calc__add", "{}")
    for step in (
        replace(BEGUN, servers=[ServerUse("calc", approval="never")]),
        Listed(0, "calc", [ListedTool("add", {})]),
        Asked(0, 0),
        Answered(0, 0, "", [called], Usage(1, 1)),
    ):
        await logs[0].append(step)
    await logs[1].refresh()
    await logs[0].append(Sending(0, 0, 0, 0, "k", "d", "one"))
    with pytest.raises(Fenced):
        await logs[1].append(Sending(0, 0, 0, 0, "k", "d", "other"))
    # A stored step is recognised when its ack was lost.
    again = StepLog(bus, "t", name)
    stored = await bus.read(subjects.STEPS_STREAM, subjects.steps("t", name))
    for message in stored[:-1]:
        again.accept(message)
    await again.append(Sending(0, 0, 0, 0, "k", "d", "one"))
    assert again.state.num_steps == logs[1].state.num_steps == 5


async def test_a_watch_ends_the_current_work_when_it_reads_anothers_step(bus: Bus) -> None:
    name = new_id()
    log, other = StepLog(bus, "t", name), StepLog(bus, "t", name)
    await log.append(BEGUN)
    async with log.watch() as watch:
        assert await watch.next() == []
        await other.refresh()
        ended = await other.append(Ended(0, "cancelled", 2))
        while not log.overtaken:
            await watch.next()
        assert log.state.ended == ended
        with pytest.raises(Fenced):
            await log.append(Asked(0, 0))
    assert [step async for step in other.follow()] == []


async def test_calls_made_at_the_same_time_are_refused_together(bus: Bus) -> None:
    """The second call was planned from the same steps as the first one, which is refused."""
    name = new_id()
    log, other = StepLog(bus, "t", name), StepLog(bus, "t", name)
    calls = [FunctionCall("calc__add", "{}")] * 2
    for step in (
        replace(BEGUN, servers=[ServerUse("calc", approval="never")]),
        Listed(0, "calc", [ListedTool("add", {})]),
        Asked(0, 0),
        Answered(0, 0, "", calls, Usage(1, 1)),
    ):
        await log.append(step)
    await other.refresh()
    await other.append(Ended(0, "cancelled", 2))
    sending = [Sending(0, 0, number, 0, "k", "d", "one") for number in range(2)]
    refused = await asyncio.gather(*(log.append(s) for s in sending), return_exceptions=True)
    assert [type(error) for error in refused] == [Fenced, Fenced]
    assert (await open_log(bus, "t", name)).state.num_steps == 5


async def test_a_follower_sees_every_step_once(bus: Bus) -> None:
    name = new_id()
    writer, reader = StepLog(bus, "t", name), StepLog(bus, "t", name)
    await writer.append(BEGUN)
    steps = await reader.refresh()
    following = reader.follow()
    await writer.append(Asked(0, 0))
    await writer.append(Ended(0, "failed", 2))
    steps += [step async for step in following]
    assert [step.index for step in steps] == [0, 1, 2]
    await writer.delete()
    assert (await open_log(bus, "t", name)).state.begun is None
