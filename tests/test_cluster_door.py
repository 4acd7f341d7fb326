"""The clients of `make cluster`, before a door that answers what it likes."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from ops.cluster.checks import begun_or_ended
from ops.cluster.door import Door

CHUNK = 'data: {"choices": [{"delta": {"content": "once"}}]}\n\n'


def respond(request: httpx.Request) -> httpx.Response:
    if b"number 1." in request.content:
        return httpx.Response(503, text="no engine")
    return httpx.Response(200, text=CHUNK + "data: [DONE]\n\n")


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door(1)
    await made._client.aclose()
    made._client = httpx.AsyncClient(base_url="http://door", transport=httpx.MockTransport(respond))
    yield made
    await made.close()


async def test_a_streamed_refusal_is_an_error_and_nobody_waits_for_its_answer(door: Door) -> None:
    begun = asyncio.Event()
    answers = asyncio.create_task(door.long_texts(2, 5, begun))
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="answer 1: 503 no engine"):
            await begun_or_ended(begun, answers)
    assert not begun.is_set()


async def test_texts_are_put_together(door: Door) -> None:
    begun = asyncio.Event()
    answers = asyncio.create_task(door.long_texts(1, 5, begun))
    await begun_or_ended(begun, answers)
    assert await answers == ["once"]
