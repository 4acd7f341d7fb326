"""Logs of batches: one writer, orders of clients, and pages of results."""

import secrets
from typing import Any

import pytest
from msgspec.structs import replace

from shared.batches.line_set import LineSet
from shared.batches.state import FinishedLine, checkpoint_after, results_of
from shared.bus.bus import READ_BATCH, Bus
from shared.bus.metering import StreamMeter
from shared.bus.reading import StoredMessage
from shared.errors import Fenced, NotFound, UnsupportedVersion
from shared.protocol import subjects
from shared.protocol.batch_log import BatchBegun, BatchEnded, Checkpoint, Claimed, Validated
from shared.protocol.encoding import to_json
from shared.state import batch_log
from shared.state.batch_log import BatchLog, open_batch


def new_order(bus: Bus, tenant: str = "t") -> BatchBegun:
    batch_id, now_s = f"batch_{secrets.token_hex(8)}", int(bus.now_ms() / 1000)
    deadline_s = now_s + 3600
    return BatchBegun(
        batch_id, tenant, "/v1/completions", "0" * 64, now_s, "1h", deadline_s, deadline_s
    )


async def begin(bus: Bus, tenant: str = "t") -> BatchLog:
    order = new_order(bus, tenant)
    await batch_log.begin(bus, order)
    return await reopen(bus, order)


async def reopen(bus: Bus, order: BatchBegun) -> BatchLog:
    log = await open_batch(bus, order.tenant, order.batch_id)
    assert log is not None
    return log


async def claim(log: BatchLog, name: str) -> None:
    await log.append(Claimed(log.next_index, 1, name, log.state.checkpoint))


async def finish(log: BatchLog, *lines: int) -> None:
    finished = [FinishedLine(n, b'{"line":%d}' % n, "" if n % 2 else "unknown") for n in lines]
    now = checkpoint_after(log.state.checkpoint, finished, lambda line: (line, 10 * line))
    await log.append(results_of(log.next_index, 1, finished, now))


async def test_a_batch_continues_from_its_last_record_alone(bus: Bus) -> None:
    log = await begin(bus)
    assert log.state.status == "validating"
    await claim(log, "one")
    await log.append(Validated(log.next_index, 2, Checkpoint(num_lines=4, began_s=2)))
    await finish(log, 3, 1)
    again = await reopen(bus, log.state.begun)
    assert again.state == log.state
    assert LineSet.unpack(again.state.checkpoint.finished).ranges == [(1, 2), (3, 4)]
    await claim(again, "two")
    await finish(again, 2, 4)
    await again.append(BatchEnded(again.next_index, 3, "completed", again.state.checkpoint))
    assert (await reopen(bus, log.state.begun)).state.status == "completed"


async def test_a_batcher_that_comes_back_writes_nothing(bus: Bus) -> None:
    first = await begin(bus)
    await claim(first, "first")
    await first.append(Validated(first.next_index, 2, Checkpoint(num_lines=4, began_s=2)))
    second = await reopen(bus, first.state.begun)
    await claim(second, "second")
    with pytest.raises(Fenced):
        await finish(first, 1)
    await finish(second, 1)
    stored = await bus.read(
        subjects.BATCHES_STREAM,
        subjects.stored_batch(subjects.batch_log("t", first.state.begun.batch_id)),
    )
    assert len(stored) == 4


async def test_a_record_whose_acknowledgement_is_lost_is_not_written_twice(bus: Bus) -> None:
    log = await begin(bus)
    same = await reopen(bus, log.state.begun)
    await claim(log, "one")
    await claim(same, "one")  # Appends the same bytes, as a repeated publish does.
    await finish_validation(same)
    assert same.next_index == 2
    with pytest.raises(Fenced):
        await finish_validation(log, num_lines=3)


async def finish_validation(log: BatchLog, num_lines: int = 2) -> None:
    await log.append(Validated(log.next_index, 2, Checkpoint(num_lines=num_lines, began_s=2)))


async def test_a_cancellation_does_not_disturb_the_writer(bus: Bus) -> None:
    log = await begin(bus)
    await claim(log, "one")
    await batch_log.cancel(bus, log.state.begun)
    await batch_log.cancel(bus, log.state.begun)
    assert (await reopen(bus, log.state.begun)).state.status == "cancelling"
    assert await log.is_cancelled()
    await finish_validation(log)
    assert log.state.status == "cancelling"


async def test_batches_belong_to_a_tenant(bus: Bus) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    logs = [await begin(bus, tenant) for _ in range(3)]
    await begin(bus, f"{tenant}x")
    listed = await batch_log.list_begun(bus, tenant)
    assert listed == [log.state.begun for log in reversed(logs)]
    assert await open_batch(bus, "other", listed[0].batch_id) is None
    for name in ("*", f"{listed[0].batch_id}.begun", "", "batch_x"):
        assert await open_batch(bus, tenant, name) is None
    states = await batch_log.open_batches(bus, listed)
    assert [state.begun for state in states] == listed
    assert await batch_log.list_begun(bus, tenant, limit=2) == listed[:2]
    assert await batch_log.list_begun(bus, tenant, after=listed[0].batch_id) == listed[1:]
    for name in (new_order(bus).batch_id, "*"):
        with pytest.raises(NotFound):
            await batch_log.list_begun(bus, tenant, after=name)


async def test_a_list_reads_only_its_newest_batches(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    orders = [new_order(bus, tenant) for _ in range(800)]
    for order in orders[:700]:
        await store(bus, order)
    for _ in range(900):
        await store(bus, new_order(bus, f"{tenant}x"))
    for order in orders[700:]:
        await store(bus, order)
    num_read, read_batch = 0, bus.read_batch

    async def counted(*args: Any) -> tuple[list[StoredMessage], bool]:
        nonlocal num_read
        batch, has_more = await read_batch(*args)
        num_read += len(batch)
        return batch, has_more

    monkeypatch.setattr(bus, "read_batch", counted)
    assert await batch_log.list_begun(bus, tenant, limit=20) == orders[:-21:-1]
    assert num_read <= READ_BATCH
    num_read = 0
    # These are on both sides of the batches of the other tenant. Other tests may add some.
    assert await batch_log.list_begun(bus, tenant, limit=200) == orders[:-201:-1]
    assert num_read <= 6 * READ_BATCH
    assert await batch_log.list_begun(bus, tenant) == orders[::-1]
    assert await batch_log.list_begun(bus, tenant, after=orders[99].batch_id) == orders[98::-1]


async def store(bus: Bus, order: BatchBegun) -> None:
    subject = subjects.batch_begun(order.tenant, order.batch_id)
    await bus.publish_without_id(subject, to_json(order))


async def test_a_batch_is_begun_and_queued_once(bus: Bus) -> None:
    order = new_order(bus)
    before, _ = await bus.figures.size(subjects.BATCHJOBS_STREAM)
    await batch_log.begin(bus, order)
    with pytest.raises(Fenced):
        await batch_log.begin(bus, replace(order, window="2h"))
    assert (await bus.figures.size(subjects.BATCHJOBS_STREAM))[0] == before + 1
    assert (await reopen(bus, order)).state.begun == order


async def test_results_are_read_in_pages_and_removed_together(bus: Bus) -> None:
    log = await begin(bus)
    await claim(log, "one")
    await finish_validation(log, num_lines=600)
    for number in range(1, 601, 2):
        await finish(log, number, number + 1)
    sequence, lines = 1, []
    while sequence:
        page, sequence = await batch_log.read_results(bus, log.state.begun, sequence)
        lines += [line for _, record in page for line in record.lines]
    assert sorted(lines) == list(range(1, 601))
    await log.append(BatchEnded(log.next_index, 3, "completed", log.state.checkpoint))
    await batch_log.remove_results(bus, await reopen(bus, log.state.begun))
    again = await reopen(bus, log.state.begun)
    assert again.state.ended is not None
    assert again.state.ended.removed
    assert again.state.checkpoint == log.state.checkpoint
    assert await batch_log.read_results(bus, log.state.begun) == ([], 0)


async def test_removed_results_do_not_count_for_their_tenant(bus: Bus) -> None:
    tenant, num_bytes = f"t{secrets.token_hex(4)}", 100_000
    log = await begin(bus, tenant)
    await claim(log, "one")
    await log.append(Validated(log.next_index, 2, Checkpoint(num_lines=1, began_s=2)))
    result = FinishedLine(1, b'"%s"' % (b"x" * num_bytes))
    now = checkpoint_after(log.state.checkpoint, [result], lambda line: (line, 0))
    await log.append(results_of(log.next_index, 1, [result], now))
    await log.append(BatchEnded(log.next_index, 3, "completed", log.state.checkpoint))
    meter = StreamMeter(bus)
    assert (await meter.measure_tenants(subjects.BATCHES_STREAM))[tenant] > num_bytes
    await batch_log.remove_results(bus, log)
    assert (await meter.measure_tenants(subjects.BATCHES_STREAM))[tenant] < 10_000


async def test_a_record_of_a_newer_version_is_left_to_a_newer_batcher(bus: Bus) -> None:
    log = await begin(bus)
    begun = log.state.begun
    await bus.append(subjects.batch_log("t", begun.batch_id), b'{"type":"compacted"}', 0)
    with pytest.raises(UnsupportedVersion):
        await open_batch(bus, "t", begun.batch_id)
