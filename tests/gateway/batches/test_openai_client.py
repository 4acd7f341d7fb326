"""Files and batches with the official Python client, which is unchanged."""

import json
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.gateway.batches.conftest import (
    CHAT,
    BatchRig,
    begin,
    chat_line,
    ended,
    jsonl,
    results_of,
)
from tests.gateway.conftest import Process

HOUR_S = 3600
MANY_S = 90_000


def test_the_synchronous_client_follows_the_guide(
    rig: BatchRig, batcher: Process, tmp_path: Path
) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_bytes(jsonl([chat_line(n) for n in range(3)]))
    with OpenAI(base_url=f"{rig.gateway.url}/v1", api_key="none", max_retries=0) as client:
        with questions.open("rb") as content:
            file = client.files.create(file=content, purpose="batch")
        assert (file.filename, file.bytes) == ("questions.jsonl", questions.stat().st_size)
        assert client.files.wait_for_processing(file.id).status == "processed"
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "1"}
        )
        while client.batches.retrieve(batch.id).status in ("validating", "in_progress"):
            time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.metadata) == ("completed", {"job": "1"})
        assert batch.output_file_id is not None
        client.files.content(batch.output_file_id).write_to_file(answers)
        with client.files.with_streaming_response.content(batch.output_file_id) as response:
            assert b"".join(response.iter_bytes(7)) == answers.read_bytes()
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        assert {line["custom_id"] for line in lines} == {"line-0", "line-1", "line-2"}
        assert client.files.content(file.id).content == questions.read_bytes()


async def test_the_usage_of_a_batch_is_the_sum_of_its_lines(
    client: AsyncOpenAI, batcher: Process
) -> None:
    batch = await ended(client, (await begin(client, jsonl([chat_line(n) for n in range(9)]))).id)
    results = await results_of(client, batch.output_file_id)
    usages = [line["response"]["body"]["usage"] for line in results.values()]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert batch.usage.input_tokens_details.cached_tokens == 0
    assert batch.usage.output_tokens_details.reasoning_tokens == 0


async def test_files_and_results_expire_when_the_client_says(
    client: AsyncOpenAI, batcher: Process
) -> None:
    content = jsonl([chat_line(0)])
    expiry = {"anchor": "created_at", "seconds": MANY_S}
    file = await client.files.create(
        file=("a.jsonl", content),
        purpose="batch",
        expires_after=expiry,  # type: ignore[arg-type]
    )
    assert file.expires_at == file.created_at + MANY_S
    assert (await client.files.retrieve(file.id)).expires_at == file.expires_at
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": HOUR_S},
    )
    assert batch.expires_at == batch.created_at + 24 * HOUR_S
    batch = await ended(client, batch.id)
    assert batch.output_file_id is not None
    output = await client.files.retrieve(batch.output_file_id)
    assert batch.expires_at is not None
    assert output.expires_at == batch.expires_at + HOUR_S


async def test_pages_of_batches(client: AsyncOpenAI, batcher: Process) -> None:
    ids = [(await begin(client, jsonl([chat_line(n)]))).id for n in range(3)]
    first = await client.batches.list(limit=1)
    assert ([batch.id for batch in first.data], first.has_more) == ([ids[2]], True)
    second = await client.batches.list(limit=2, after=ids[2])
    assert [batch.id for batch in second.data] == [ids[1], ids[0]]
    assert second.to_dict()["first_id"] == ids[1]
    assert second.to_dict()["last_id"] == ids[0]
    with pytest.raises(NotFoundError) as unknown:
        await client.batches.list(after="batch_" + "0" * 32)
    assert unknown.value.param == "after"
    for limit in (0, 101):
        with pytest.raises(BadRequestError) as refusal:
            await client.batches.list(limit=limit)
        assert refusal.value.param == "limit"
    for batch_id in ids:
        await ended(client, batch_id)


async def test_a_batch_that_has_ended_stays_as_it_is_when_it_is_cancelled(
    client: AsyncOpenAI, batcher: Process
) -> None:
    batch = await ended(client, (await begin(client, jsonl([chat_line(0)]))).id)
    assert await client.batches.cancel(batch.id) == batch
    assert await client.batches.retrieve(batch.id) == batch
    with pytest.raises(NotFoundError):
        await client.batches.cancel("batch_" + "0" * 32)
