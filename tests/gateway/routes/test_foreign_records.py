"""Requests with foreign logs or records, as clients and `pagemill follow` see them."""

import asyncio
import json
import os
import secrets
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import Finish
from shared.state.token_log import last_record
from tests.cluster.conftest import FORKED_PAGEMILL, ROOT, Cluster
from tests.gateway.conftest import Gateway
from tests.gateway.routes.test_chat import events, question
from tests.gateway.routes.test_requests import PATH, long

QUESTION: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Describe it."}],
    "max_tokens": 200,
    "temperature": 0.0,
    "stream": True,
}
OPTIONS = {"ignore_eos": True, "durable": True}
LIMIT_S = 90
# A record in a form that this version does not know.
NEWER = b'{"kind": {"name": "chat", "version": 2}}'


@pytest.fixture
def name() -> str:
    return f"foreign-{secrets.token_hex(6)}"


@pytest.fixture
async def official(gateway: Gateway, name: str) -> AsyncIterator[AsyncOpenAI]:
    """The stock client. The id of its requests is the name of this test."""
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="none",
        max_retries=0,
        default_headers={"x-request-id": name},
    ) as client:
        yield client


async def text_of(stream: Any) -> str:
    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


async def put(bus: Bus, request_id: str, kind: str) -> None:
    """Append a foreign message to the log."""
    last = await last_record(bus, request_id)
    index = 0 if last is None else last.index + 1
    later = {"type": "a later kind", "index": index, "attempt": 1}
    data = {
        "bytes": b"\xff",
        "no record": b'{"type": 5}',
        "a later kind": json.dumps(later).encode(),
        "a later kind far ahead": json.dumps(later | {"index": index + 1000}).encode(),
        "a later kind behind": json.dumps(later | {"index": -5}).encode(),
    }[kind]
    await bus.publish_without_id(subjects.append(request_id), data)


async def follow(cluster: Cluster, request_id: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *FORKED_PAGEMILL,
        "follow",
        request_id,
        "--wait",
        "30",
        "--nats",
        cluster.url,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err) == (0, b"")
    return out.decode().removesuffix("\n")


async def replayed(http: httpx.AsyncClient, request_id: str) -> str:
    got = events((await http.get(f"/v1/requests/{request_id}/stream")).text)
    assert got[-1][1] == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for _, chunk in got[:-1] if chunk.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


KINDS = ["bytes", "no record", "a later kind", "a later kind far ahead", "a later kind behind"]


@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_reader_gets_the_whole_answer(
    official: AsyncOpenAI,
    http: httpx.AsyncClient,
    cluster: Cluster,
    bus: Bus,
    name: str,
    kind: str,
    moment: str,
) -> None:
    request_id = name
    if moment == "before":
        await put(bus, request_id, kind)
    async with asyncio.timeout(LIMIT_S):
        stream = await official.chat.completions.create(**QUESTION, extra_body=OPTIONS)
        first = await anext(stream)
        if moment == "between":
            await put(bus, request_id, kind)
        text, again, followed = await asyncio.gather(
            text_of(stream), replayed(http, request_id), follow(cluster, request_id)
        )
        text = (first.choices[0].delta.content or "") + text
        await put(bus, request_id, kind)  # After the end.
        status = (await http.get(f"/v1/requests/{request_id}")).json()
        assert status["state"] == "finished", status
        whole = status["result"]["choices"][0]["message"]["content"]
        assert status["result"]["usage"]["completion_tokens"] == 200
        assert [text, again, followed] == [whole] * 3
        assert await replayed(http, request_id) == await follow(cluster, request_id) == whole


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_not_streamed_is_whole(
    official: AsyncOpenAI, bus: Bus, name: str, kind: str
) -> None:
    await put(bus, name, kind)
    async with asyncio.timeout(LIMIT_S):
        answer = await official.chat.completions.create(
            **QUESTION | {"stream": False, "max_tokens": 8}, extra_body=OPTIONS
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_a_record_of_a_newer_gateway_is_asked_for_again(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    """Under another id, as the error for a client's fault would ask for, it would run twice."""
    name = f"newer-{time.time_ns()}"
    request_id = name
    await bus.append(subjects.job(request_id), NEWER, 0)
    body, headers = question("Describe it."), {"x-request-id": name}
    refused = await http.post(PATH, json=body, headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "unavailable")
    assert error["param"] == "X-Request-Id"
    assert await last_record(bus, request_id) is None
    stored = await bus.read_last(subjects.JOBS_STREAM, subjects.job(request_id))
    assert stored is not None
    assert stored.data == NEWER
    await bus.purge(subjects.JOBS_STREAM, subjects.job(request_id))
    assert (await http.post(PATH, json=body, headers=headers)).status_code == 200


async def test_a_request_that_a_newer_gateway_has_recorded_is_not_cancelled(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    headers = {"x-request-id": f"newer-{time.time_ns()}"}
    async with http.stream("POST", PATH, json=long(max_tokens=900), headers=headers) as stream:
        await anext(stream.aiter_lines())
        request_id = stream.headers["x-request-id"]
        await bus.publish_without_id(subjects.job(request_id), NEWER)
    log = [record async for record in client.follow(bus, request_id, timeout_s=60)]
    assert isinstance(log[-1], Finish), log[-1]
