"""Payloads of a worker that drains."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
import structlog

from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, ModelConfig
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.multimodal import BlobRef
from shared.stage.runtime import Context

NAME = "ab" * 32


async def tell(bus: Bus, model: str) -> None:
    """Publish a heartbeat of an engine, which counts as alive for three seconds."""
    beat = Heartbeat("engine", f"engine-{model}", "0", 1, [model], {})
    await bus.heartbeats.publish(beat.worker, to_json(beat))


class Renderer:
    """A renderer with a payload that no engine has fetched."""

    def __init__(self, bus: Bus, drain_s: float) -> None:
        self.model = f"m-{secrets.token_hex(4)}"
        config = Config(
            {self.model: ModelConfig("nowhere")}, delivery=DeliveryConfig(drain_s=drain_s)
        )
        name = f"renderer-{self.model}"
        self.context = Context("renderer", name, None, config, bus, structlog.get_logger())

    async def start(self) -> BlobRef:
        self.blobs = await self.context.open_blobs()
        ref = self.blobs.put(NAME, [b"abc"], 600)
        assert ref is not None
        return ref

    async def begin_drain(self) -> asyncio.Task[None]:
        """Return the drain, after a moment in which it would end if nothing held it up."""
        self.context.shutdown.signal()
        drain = asyncio.create_task(self.context.drain_blobs())
        await asyncio.wait({drain}, timeout=0.5)
        return drain


@pytest.fixture
async def renderer(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Renderer]:
    renderer = Renderer(bus, getattr(request, "param", 60.0))
    yield renderer
    await renderer.context.close()


async def test_a_drain_waits_until_payloads_are_fetched(bus: Bus, renderer: Renderer) -> None:
    ref = await renderer.start()
    await tell(bus, renderer.model)
    drain = await renderer.begin_drain()
    assert not drain.done()
    await renderer.blobs.acknowledge(ref)
    await asyncio.wait_for(drain, 2.5)


async def test_a_second_signal_ends_the_wait_for_payloads(bus: Bus, renderer: Renderer) -> None:
    await renderer.start()
    await tell(bus, renderer.model)
    drain = await renderer.begin_drain()
    assert not drain.done()
    renderer.context.shutdown.signal()
    await asyncio.wait_for(drain, 2.5)


@pytest.mark.parametrize("renderer", [1.0], indirect=True)
async def test_a_drain_waits_for_payloads_no_longer_than_its_time(
    bus: Bus, renderer: Renderer
) -> None:
    await renderer.start()
    await tell(bus, renderer.model)
    drain = await renderer.begin_drain()
    assert not drain.done()
    await asyncio.wait_for(drain, 2.0)


async def test_no_payload_waits_for_workers_that_do_not_live(renderer: Renderer) -> None:
    await renderer.start()
    assert (await renderer.begin_drain()).done()
