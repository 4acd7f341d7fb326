"""Batches over HTTP, with the official client: one result for each line, whatever happens."""

import json
import os
import signal
from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from ops.chaos.agents.scripted_model import MODEL
from shared.batches.open_lines import BLOCK_BYTES
from shared.batches.state import faults_of
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.batch_log import BatchBegun, Claimed, Results
from shared.state import batch_log
from tests.gateway.batches.conftest import (
    CHAT,
    BatchRig,
    begin,
    chat_line,
    ended,
    jsonl,
    records_of,
    results_of,
)
from tests.gateway.conftest import Process
from tests.support.waiting import until

NUM_LINES = 300
MANY = 500
UNREAD = 20_000
LONG = 60_000


def texts(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {
        name: line["response"]["body"]["choices"][0]["message"]["content"]
        for name, line in results.items()
    }


def echoes(num_lines: int) -> dict[str, str]:
    return {f"line-{n}": f"echo line {n}" for n in range(num_lines)}


async def test_the_official_client_runs_a_batch(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    content = jsonl([chat_line(n) for n in range(NUM_LINES)])
    batch = await begin(client, content, metadata={"a": "b"})
    assert batch.status in ("validating", "in_progress")
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"a": "b"})
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": NUM_LINES, "completed": 300, "failed": 0}
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.completed_at is not None
    assert batch.in_progress_at is not None
    assert batch.error_file_id is None
    results = await results_of(client, batch.output_file_id)
    assert texts(results) == echoes(NUM_LINES)
    line = results["line-7"]
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["id"].startswith("batch_req_")
    # Every line was one request, in the batch lane.
    asked = {name: r for name, r in rig.model.requests.items() if name.startswith(batch.id)}
    assert line["response"]["request_id"] in asked
    assert len(asked) == NUM_LINES
    assert {request.lane for request in asked.values()} == {"batch"}
    assert faults_of(await records_of(batch_bus, batch.id)) == []


async def test_files_and_batches_are_listed_and_removed(
    client: AsyncOpenAI, batcher: Process
) -> None:
    ids = []
    for number in range(3):
        batch = await begin(client, jsonl([chat_line(number)]))
        ids.append((await ended(client, batch.id)).id)
    first = await client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == ids[:0:-1]
    pages = [batch.id async for batch in client.batches.list(limit=2)]
    assert pages[:3] == ids[::-1]
    assert len(set(pages)) == len(pages)
    with pytest.raises(NotFoundError):
        await client.batches.retrieve("batch_" + "0" * 32)

    inputs = [file.id async for file in client.files.list(purpose="batch", limit=2)]
    outputs = [file.id async for file in client.files.list(purpose="batch_output", limit=1)]
    assert batch.input_file_id in inputs
    done = await client.batches.retrieve(batch.id)
    assert done.output_file_id in outputs
    listed = [file.id async for file in client.files.list(order="asc")]
    assert set(inputs) | set(outputs) <= set(listed)
    assert done.output_file_id is not None
    file = await client.files.retrieve(done.output_file_id)
    content = await client.files.content(file.id)
    assert (file.bytes, file.purpose) == (len(content.content), "batch_output")
    assert (await client.files.wait_for_processing(file.id)).status == "processed"

    assert (await client.files.delete(file.id)).deleted
    assert (await client.batches.retrieve(batch.id)).output_file_id is None
    for removed in (file.id, batch.input_file_id):
        await client.files.delete(removed) if removed != file.id else None
        with pytest.raises(NotFoundError):
            await client.files.content(removed)
        with pytest.raises(NotFoundError):
            await client.files.delete(removed)


async def test_an_error_of_a_line_is_in_the_error_file_alone(
    client: AsyncOpenAI, batcher: Process
) -> None:
    lines = [chat_line(0), chat_line(1, temperature=-1), chat_line(2, nonsense=1), chat_line(3)]
    batch = await ended(client, (await begin(client, jsonl(lines))).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert (await results_of(client, batch.output_file_id)).keys() == {"line-0", "line-3"}
    assert batch.to_dict()["error_counts"] == {
        "invalid_request": 1,
        "unknown_parameter": 1,
    }
    errors = await results_of(client, batch.error_file_id)
    assert {
        name: (line["response"]["status_code"], line["response"]["body"]["error"]["param"])
        for name, line in errors.items()
    } == {"line-1": (400, "temperature"), "line-2": (400, "nonsense")}


async def test_a_file_with_errors_runs_nothing(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    lines = [chat_line(0), chat_line(0), chat_line(2, stream=True)]
    batch = await ended(client, (await begin(client, jsonl(lines))).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data or []] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_line", "body.stream"),
    ]
    assert batch.output_file_id is batch.error_file_id is None
    assert not any(name.startswith(batch.id) for name in rig.model.requests)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "1000h"}, "completion_window"),
        ({"completion_window": "day"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_a_wrong_order_names_its_field(
    client: AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await begin(client, jsonl([chat_line(0)]), **fields)
    assert str(refusal.value.param).startswith(param)


async def test_the_input_file_must_be_one_of_the_tenants_batch_files(client: AsyncOpenAI) -> None:
    order: dict[str, Any] = {"completion_window": "24h", "endpoint": CHAT}
    with pytest.raises(NotFoundError):
        await client.batches.create(input_file_id=f"file-{'0' * 64}", **order)
    image = await client.files.create(file=("a.png", b"png"), purpose="vision")
    with pytest.raises(BadRequestError, match="purpose batch"):
        await client.batches.create(input_file_id=image.id, **order)
    file = await client.files.create(
        file=("a.jsonl", jsonl([chat_line(0, user="no other file is equal")])),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(BadRequestError, match="expires before the window ends"):
        await client.batches.create(input_file_id=file.id, **order)


async def test_a_named_batch_is_begun_once(client: AsyncOpenAI, batcher: Process) -> None:
    headers = {"Idempotency-Key": "one name"}
    content = jsonl([chat_line(0)])
    first = await begin(client, content, extra_headers=headers)
    assert (await begin(client, content, extra_headers=headers)).id == first.id
    assert (await ended(client, first.id)).status == "completed"
    # A repeated request gets its batch also when it could not begin any more.
    await client.files.delete(first.input_file_id)
    order: dict[str, Any] = {"completion_window": "24h", "endpoint": CHAT}
    again = await client.batches.create(
        input_file_id=first.input_file_id, extra_headers=headers, **order
    )
    assert (again.id, again.status) == (first.id, "completed")


async def test_a_cancelled_batch_keeps_its_finished_lines(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    with rig.model.held_after(100):
        batch = await begin(client, jsonl([chat_line(n) for n in range(NUM_LINES)]))
        await until(lambda: has_results(client, batch.id, 100))
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        assert cancelling.cancelling_at is not None
        batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    answered = await results_of(client, batch.output_file_id)
    refused = await results_of(client, batch.error_file_id)
    assert len(answered) >= 100
    assert answered.keys() | refused.keys() == echoes(NUM_LINES).keys()
    assert answered.keys().isdisjoint(refused)
    assert {line["error"]["code"] for line in refused.values()} == {"batch_cancelled"}
    assert faults_of(await records_of(batch_bus, batch.id)) == []


async def test_a_batch_that_is_cancelled_before_it_runs_has_an_error_for_each_line(
    client: AsyncOpenAI, rig: BatchRig, batch_bus: Bus
) -> None:
    if rig.batchers:
        rig.kill_batcher()
    batch = await begin(client, jsonl([chat_line(n) for n in range(UNREAD)]))
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    rig.start_batcher()
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": UNREAD, "completed": 0, "failed": UNREAD}
    assert (await results_of(client, batch.error_file_id)).keys() == echoes(UNREAD).keys()
    records = await records_of(batch_bus, batch.id)
    assert faults_of(records) == []
    sizes = [sum(map(len, r.errors)) for r in records if isinstance(r, Results)]
    assert min(sizes[:-1]) > BLOCK_BYTES / 2


async def test_a_batch_whose_input_is_deleted_keeps_its_results(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    lines = [chat_line(n, user="x" * LONG) for n in range(NUM_LINES)]
    cancelled_before = (await batch_bus.figures.sequence_range(subjects.CANCELS_STREAM))[1]
    with rig.model.held_after(20):
        batch = await begin(client, jsonl(lines))
        await until(lambda: has_results(client, batch.id, 20))
        await client.files.delete(batch.input_file_id)
        rig.model.num_free += 200
        batch = await ended(client, batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["not_found"]
    assert batch.request_counts is not None
    answered = await results_of(client, batch.output_file_id)
    assert 20 < len(answered) == batch.request_counts.completed < len(lines)
    # The requests in flight do not run on.
    cancelled = (await batch_bus.figures.sequence_range(subjects.CANCELS_STREAM))[1]
    assert cancelled > cancelled_before
    assert faults_of(await records_of(batch_bus, batch.id)) == []


async def has_results(client: AsyncOpenAI, batch_id: str, number: int) -> bool:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts is not None and counts.completed >= number


async def test_a_batch_ends_with_its_window(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    content = jsonl([chat_line(n) for n in range(20)])
    file = await client.files.create(file=("a.jsonl", content), purpose="batch")
    with rig.model.held_after(5):
        now_s = int(batch_bus.now_ms() / 1000)
        name = file.id.removeprefix("file-")
        order = BatchBegun(
            "batch_" + "e" * 32, "", CHAT, name, now_s, "1h", now_s + 3, now_s + 3600
        )
        await batch_log.begin(batch_bus, order)
        batch = await ended(client, order.batch_id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert now_s + 3 <= batch.expired_at <= now_s + 20
    answered = await results_of(client, batch.output_file_id)
    refused = await results_of(client, batch.error_file_id)
    assert len(answered) == 5
    assert len(refused) == 15
    assert {line["error"]["code"] for line in refused.values()} == {"batch_expired"}


async def test_a_killed_batcher_is_replaced_in_the_middle_of_lines(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    batch = await begin(client, jsonl([chat_line(n) for n in range(MANY)]))

    async def is_claimed(times: int) -> bool:
        records = await records_of(batch_bus, batch.id)
        return sum(isinstance(record, Claimed) for record in records) == times

    for number in range(1, 4):
        await until(partial(is_claimed, number))
        await until(partial(has_results, client, batch.id, 50 * number))
        rig.kill_batcher()
        rig.start_batcher()
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert texts(await results_of(client, batch.output_file_id)) == echoes(MANY)
    records = await records_of(batch_bus, batch.id)
    assert faults_of(records) == []
    assert sum(isinstance(record, Claimed) for record in records) == 4
    # Lines in flight were found again by their ids.
    numbers = Counter({n: c for n, c in rig.model.answered.items() if n.startswith(batch.id)})
    assert len(numbers) == MANY
    assert set(numbers.values()) == {1}


async def test_a_batcher_that_was_stopped_writes_nothing_after_its_successor(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    batch = await begin(client, jsonl([chat_line(n) for n in range(MANY)]))
    await until(lambda: has_results(client, batch.id, 100))
    os.kill(batcher.pid, signal.SIGSTOP)
    try:
        rig.start_batcher()
        records: list[Any] = []

        async def has_successor() -> bool:
            records[:] = await records_of(batch_bus, batch.id)
            return sum(isinstance(record, Claimed) for record in records) == 2

        await until(has_successor)
    finally:
        os.kill(batcher.pid, signal.SIGCONT)
    assert (await ended(client, batch.id)).status == "completed"
    assert faults_of(await records_of(batch_bus, batch.id)) == []
    batch = await client.batches.retrieve(batch.id)
    assert texts(await results_of(client, batch.output_file_id)) == echoes(MANY)
    rig.batchers.remove(batcher)
    batcher.kill()
    batcher.wait(10)


async def test_a_draining_batcher_leaves_its_batch_to_the_next(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    with rig.model.held_after(50):
        batch = await begin(client, jsonl([chat_line(n) for n in range(100)]))
        await until(lambda: has_results(client, batch.id, 50))
        drained = rig.batchers.pop()
        drained.send_signal(signal.SIGTERM)
        assert drained.wait(20) == 0
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    rig.start_batcher()
    batch = await ended(client, batch.id)
    assert texts(await results_of(client, batch.output_file_id)) == echoes(100)
    assert (await batch_bus.figures.size(subjects.BATCHJOBS_STREAM))[0] == 0


async def test_results_are_read_while_a_batch_runs(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    lines: list[dict[str, Any]] = []
    cursor = {"after": "0"}

    async def read(batch_id: str, number: int) -> bool:
        path = f"/v1/batches/{batch_id}/results"
        async with httpx.AsyncClient(base_url=rig.gateway.url, trust_env=False) as http:
            page = (await http.get(path, params=cursor)).raise_for_status()
        cursor["after"] = page.headers["x-next-after"]
        lines.extend(json.loads(line) for line in page.text.splitlines())
        return len(lines) >= number

    with rig.model.held_after(10):
        batch = await begin(client, jsonl([chat_line(n) for n in range(20)]))
        await until(partial(read, batch.id, 10))
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        rig.model.release()
        await until(partial(read, batch.id, 20))
    assert {line["custom_id"] for line in lines} == echoes(20).keys()
    assert len(lines) == 20


async def test_lines_have_the_endpoints_they_name(client: AsyncOpenAI, batcher: Process) -> None:
    body = {"model": MODEL, "prompt": "Hi"}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    batch = await begin(client, jsonl([line]), endpoint="/v1/completions")
    batch = await ended(client, batch.id)
    (result,) = (await results_of(client, batch.output_file_id)).values()
    assert result["response"]["body"]["object"] == "text_completion"


async def test_blocks_of_results_are_small(batch_bus: Bus) -> None:
    batches = await batch_log.list_begun(batch_bus, "")
    assert batches
    for order in batches:
        for record in await records_of(batch_bus, order.batch_id):
            if isinstance(record, Results):
                assert len(record.checkpoint.finished) <= 130
