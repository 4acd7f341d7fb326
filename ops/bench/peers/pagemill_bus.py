"""Pagemill's engine as it is deployed: client → NATS → engine worker → token log → client.

Token ids go to the engine's queue, as a renderer would send them. Requests with images go through
coordinator and renderer, as the PNG file that a client sends.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from ops.bench.durability import MODEL, publish_task
from ops.bench.peers.child import serve
from ops.bench.peers.pagemill import Tally, engine_config, message, model_config, sampling
from ops.bench.peers.protocol import Answer, Request, Setup
from ops.harness.deployment import deployment
from shared.bus.bus import Bus
from shared.client import ask, follow, new_request_id
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.telemetry import logs

T = TypeVar("T")


class PagemillBus:
    """A peer in a thread. The event loop continues between runs, for heartbeats."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running = contextlib.AsyncExitStack()

    def load(self, setup: Setup) -> None:
        self._bus: Bus = self._wait_for(self._start(setup))

    def prepare(self, requests: list[Request]) -> list[tuple[Request, str | None]]:
        return [(request, request.image and _data_url(request.image)) for request in requests]

    def run(self, work: list[tuple[Request, str | None]], began_s: float) -> list[Answer]:
        return self._wait_for(self._run(work, began_s))

    def phases(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self._running.aclose()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, setup: Setup) -> Bus:
        tree = {"models": {MODEL: model_config(setup)}, "engine": engine_config(setup)}
        site = await self._running.enter_async_context(deployment(tree, gateway=False))
        return await self._running.enter_async_context(site.bus())

    async def _run(self, work: list[tuple[Request, str | None]], began_s: float) -> list[Answer]:
        return await asyncio.gather(*(self._answer(*each, began_s) for each in work))

    async def _answer(self, request: Request, url: str | None, began_s: float) -> Answer:
        tally = Tally()
        async for record in self._records(request, url):
            match record:
                case TokenChunk():
                    now_s = time.perf_counter() - began_s
                    for choice in record.choices:
                        tally.take(choice.token_ids, now_s)
                case Finish():
                    tally.num_prompt_tokens = record.usage.prompt_tokens
                case Failure():
                    raise RuntimeError(record.error.message)
        return tally.answer()

    async def _records(self, request: Request, url: str | None) -> AsyncIterator[LogRecord]:
        bus, request_id = self._bus, new_request_id()
        if url is not None:
            generate = GenerateRequest(MODEL, [message(request, url)], sampling(request))
            async for record in ask(bus, generate, request_id):
                yield record
            return
        publishing = asyncio.create_task(
            publish_task(bus, request_id, request.token_ids, sampling(request))
        )
        async for record in follow(bus, request_id):
            yield record
        await publishing


def _data_url(image: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(image).read_bytes()).decode()


async def main() -> None:
    logs.configure_logging("warning", role="bench")
    peer = PagemillBus(asyncio.get_running_loop())
    try:
        await asyncio.to_thread(serve, peer)
    finally:
        await peer.close()


if __name__ == "__main__":
    uvloop.run(main())
