"""Events with the results of a batch: each result once, also for a client that reconnects."""

import json
from collections.abc import AsyncIterator

import httpx
from openai import AsyncOpenAI

from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl
from tests.gateway.conftest import Process

NUM_LINES = 60
DONE = "[DONE]"


async def read_events(
    rig: BatchRig, batch_id: str, last_id: str, limit: int | None = None
) -> list[tuple[str, str]]:
    """Return the ids and the data of events after `last_id`: all of them, or the first ones."""
    headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
    events: list[tuple[str, str]] = []
    async with (
        httpx.AsyncClient(base_url=rig.gateway.url, timeout=60, trust_env=False) as http,
        http.stream("GET", f"/v1/batches/{batch_id}/results", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for event in parse(answer.aiter_lines()):
            events.append(event)
            if len(events) == limit:
                break
    return events


async def parse(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    event_id = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, value


async def test_a_client_that_reconnects_reads_each_result_once(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    lines = [chat_line(n) for n in range(NUM_LINES - 1)] + [chat_line(NUM_LINES, temperature=-1)]
    with rig.model.held_after(20):
        batch = await begin(client, jsonl(lines))
        # The first results are read while the others cannot end.
        events = await read_events(rig, batch.id, "", 10)
    while events[-1][1] != DONE:
        # Each connection ends after some events, in the middle of a record as well.
        events += await read_events(rig, batch.id, events[-1][0], 7)
    results = [json.loads(data)["custom_id"] for _, data in events[:-1]]
    assert sorted(results) == sorted(line["custom_id"] for line in lines)
    ids = [event_id for event_id, _ in events[:-1]]
    assert len(set(ids)) == NUM_LINES

    # The pages of JSON lines continue at the same positions.
    await ended(client, batch.id)
    async with httpx.AsyncClient(base_url=rig.gateway.url, trust_env=False) as http:
        path = f"/v1/batches/{batch.id}/results"
        rest = await http.get(path, params={"after": ids[41]})
        assert [json.loads(line)["custom_id"] for line in rest.text.splitlines()] == results[42:]
        refusal = await http.get(path, headers={"last-event-id": "x"})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_stream_of_a_batch_that_has_ended_ends(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    batch = await begin(client, jsonl([chat_line(0)]))
    await ended(client, batch.id)
    events = await read_events(rig, batch.id, "")
    assert [data == DONE for _, data in events] == [False, True]
