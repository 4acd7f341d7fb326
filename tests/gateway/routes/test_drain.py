"""Requests that are in flight when their gateway drains."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from tests.cluster.conftest import Cluster, stopped
from tests.gateway.conftest import WITH_IDS, Gateway, Start, start_gateway_at
from tests.gateway.routes.test_chat import events, question
from tests.gateway.routes.test_requests import PATH, long


async def test_a_drain_lets_streams_end(another: Start) -> None:
    gateway = another()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        text = ""
        async with client.stream("POST", PATH, json=long(max_tokens=100)) as stream:
            async for line in stream.aiter_lines():
                if not text:
                    gateway.process.send_signal(signal.SIGTERM)
                text += line + "\n"
        assert events(text)[-1][1] == "[DONE]"
    assert gateway.process.wait(30) == 0


async def test_a_drain_without_time_leaves_requests_to_other_gateways(
    another: Start, http: httpx.AsyncClient
) -> None:
    named = WITH_IDS | {"x-request-id": f"drained-{time.time_ns()}"}
    body = long(max_tokens=900, n=8)
    gateway = another()
    text = ""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        try:
            async with client.stream("POST", PATH, json=body, headers=named) as stream:
                async for line in stream.aiter_lines():
                    if not text:
                        gateway.process.send_signal(signal.SIGTERM)
                        await asyncio.sleep(0.2)
                        gateway.process.send_signal(signal.SIGTERM)
                    text += line + "\n"
        except httpx.HTTPError:
            pass
    begun = [event for event in events(text) if event[0]]
    assert begun[-1][1] != "[DONE]"
    assert gateway.process.wait(30) == 0
    answer = await http.post(PATH, json=body, headers=named | {"last-event-id": begun[-1][0]})
    rest = events(answer.text)
    assert rest[-1][1] == "[DONE]"
    assert "error" not in rest[-2][1], rest[-2]


async def test_clients_that_wait_at_the_end_of_a_drain_get_the_request_id(
    cluster: Cluster, bus: Bus, tmp_path: Path, gateway: Gateway
) -> None:
    """The official client chose no id, and has received no event yet."""
    tree = yaml.safe_load(cluster.config.read_text())
    tree["delivery"] |= {"drain_s": 0.5}
    ending = start_gateway_at(cluster.url, tree | {"gateway": {"port": 0}}, tmp_path)
    body: Any = question() | {"max_tokens": 900, "n": 2, "extra_body": {"ignore_eos": True}}
    engine = await cluster.pid(bus, "engine")
    begun = asyncio.Event()
    last = AsyncOpenAI(base_url=f"{ending.url}/v1", api_key="none", max_retries=0)
    other = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)

    async def stream() -> openai.APIError:
        try:
            async for _ in await last.chat.completions.create(**body, stream=True):
                begun.set()
        except openai.APIError as error:
            return error
        raise AssertionError("it came to its end")

    async with last, other:
        streaming = asyncio.create_task(stream())
        waiting = asyncio.create_task(last.chat.completions.create(**body))
        await begun.wait()
        with stopped(engine):
            ending.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.InternalServerError) as caught:
                await waiting
            assert (caught.value.status_code, caught.value.code) == (503, "interrupted")
            request_id = caught.value.request_id
            assert request_id is not None
            assert (await streaming).code == "interrupted"
            assert ending.process.wait(30) == 0
        status: Any = {"state": ""}
        while status["state"] not in ("finished", "cancelled", "failed"):
            status = await other.get(f"/requests/{request_id}", cast_to=object)
    assert status["state"] == "finished"
    assert len(status["result"]["choices"]) == 2
