"""Cancellation of a batch in front of a whole Pagemill: nothing of it runs afterwards."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from ops.chaos.broker_contents import queued_subjects
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import Failure, Finish, LogRecord
from shared.state.log_records import decode_record
from tests.gateway.batches.conftest import CHAT, begin, ended, jsonl, results_of
from tests.gateway.conftest import Gateway
from tests.support.waiting import until

NUM_LINES = 150
MAX_TOKENS = 900


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def long_line(number: int) -> dict[str, Any]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"line {number}"}],
        "max_tokens": MAX_TOKENS if number else 1,
        "ignore_eos": True,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


async def ends_of(bus: Bus, batch_id: str) -> dict[int, LogRecord | None]:
    """Return the last records of the logs of a batch's lines, by the numbers of the lines."""
    ends: dict[int, LogRecord | None] = {}
    for message in await bus.read(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER):
        name = subjects.id_of_log(message.subject)
        if name.startswith(f"{batch_id}-"):
            record = decode_record(message.data)
            ends[int(name.split("-")[1])] = record if isinstance(record, LogRecord) else None
    return ends


@pytest.mark.long
async def test_no_line_runs_after_a_cancellation(client: AsyncOpenAI, bus: Bus) -> None:
    batch = await begin(client, jsonl([long_line(number) for number in range(NUM_LINES)]))

    async def is_running() -> bool:
        counts = (await client.batches.retrieve(batch.id)).request_counts
        has_result = counts is not None and counts.completed > 0
        return has_result and bool(await queued_subjects(bus.connection.nc, batch.id))

    await until(is_running)
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    answered = await results_of(client, batch.output_file_id)
    refused = await results_of(client, batch.error_file_id)
    assert answered
    assert len(answered) + len(refused) == NUM_LINES
    assert {line["error"]["code"] for line in refused.values()} == {"batch_cancelled"}

    async def queues_are_empty() -> bool:
        return not await queued_subjects(bus.connection.nc, batch.id)

    await until(queues_are_empty)
    # Requests in flight were cancelled. Their answers would have taken much longer.
    ends = await ends_of(bus, batch.id)
    assert len(ends) < NUM_LINES
    # The results of a line and its cancellation may cross.
    cancelled = [end.error.code for end in ends.values() if isinstance(end, Failure)]
    assert set(cancelled) == {"cancelled"}
    for number, end in ends.items():
        if f"line-{number - 1}" in answered:
            assert isinstance(end, Finish)
