"""A model that answers by a script: all stages of a request, in one thread."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

from shared import client
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.records import ChoiceDelta, OutputSummary, Usage
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import GenerateRequest, decode_request
from shared.state.token_log import LogWriter

MODEL = "scripted"
Script = Callable[[GenerateRequest, str], str]
"""Function that returns the answer to a request with an id."""
CARD = ModelCard(MODEL, 4096, 768, False, True, "hermes", call_signs=[None, None])


class ScriptedModel:
    """Answers each request with the text that `script` returns for it, a few letters at a time."""

    def __init__(self, url: str, script: Script) -> None:
        self.requests: dict[str, GenerateRequest] = {}
        self.answered: Counter[str] = Counter()
        """Number of answers to each request."""
        self._url = url
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        """Stop the thread, if it runs."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        bus = await Bus.connect(self._url, "scripted")
        await bus.add_responder(subjects.renderer("card", MODEL), lambda _: to_json(CARD))
        consumer = await bus.queues.consume(
            subjects.REQUESTS_STREAM,
            subjects.REQUESTS_CONSUMER,
            subjects.REQUESTS_FILTER,
            64,
            10.0,
        )
        self._ready.set()
        stopping = asyncio.create_task(self._stop.wait())
        running: set[asyncio.Task[None]] = set()
        while not self._stop.is_set():
            following = asyncio.create_task(consumer.next())
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                break
            task = asyncio.create_task(self._answer(bus, following.result()))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running, return_exceptions=True)
        await bus.close()

    async def _answer(self, bus: Bus, delivery: Delivery) -> None:
        request_id = subjects.id_in(delivery.subject)
        request = decode_request(delivery.data)
        self.requests[request_id] = request
        log = await LogWriter.open(bus, request_id, 1)
        if not log.closed and request.image is not None:
            self.answered[request_id] += 1
            await _paint(bus, request, request_id)
            await log.finish(OutputSummary(Usage(1, 0)), {})
        elif not log.closed:
            self.answered[request_id] += 1
            text = self._script(request, request_id)
            pieces = [text[i : i + 7] for i in range(0, len(text), 7)] or [""]
            for i, piece in enumerate(pieces):
                reason: Literal["stop"] | None = "stop" if i == len(pieces) - 1 else None
                await log.tokens([ChoiceDelta(0, i, [i], piece, reason)])
            usage = Usage(len(str(request.messages)), len(pieces))
            await log.finish(OutputSummary(usage), {})
        await delivery.ack()


async def _paint(bus: Bus, request: GenerateRequest, request_id: str) -> None:
    """Write the log of an image with a preview. The prompt serves as the bytes of the image."""
    (output,) = request.outputs
    log = await LogWriter.open(bus, request_id, 1, output)
    prompt = request.prompt or ""
    preview = await client.pin_media(bus, f"preview of {prompt}".encode())
    await log.step(0, 1, 2, preview=preview)
    await log.image(0, await client.pin_media(bus, prompt.encode()), (16, 16), 0)
    await log.end(OutputSummary())
