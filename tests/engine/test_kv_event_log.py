"""KV events over NATS: a late subscriber replays them to the engine's current cache."""

import secrets
from typing import Any

from nats.aio.client import Client as NatsClient

from shared.bus.bus import Bus
from shared.client import follow
from shared.config.schema import EngineConfig
from shared.protocol import subjects
from shared.protocol.records import Finish
from shared.state.kv_event_log import NUMBER_BYTES
from tests.engine.core.test_kv_events import Findable, decode, new_core, registered
from tests.support.engine import serving_engine
from tests.support.waiting import until
from workers.engine.core.kv_events import KVEvents


def split_message(message: bytes) -> tuple[int, bytes]:
    """Split a message into its number and its payload, as a router does."""
    return int.from_bytes(message[:NUMBER_BYTES], "big"), message[NUMBER_BYTES:]


async def replay(bus: Bus, engine: str, first: int = 0) -> list[tuple[int, bytes]]:
    """Return the stored payloads of an engine from number `first` on, each with its number."""
    stored = await bus.read(subjects.KV_STREAM, subjects.kv(engine))
    return [(n, payload) for n, payload in (split_message(s.data) for s in stored) if n >= first]


async def test_a_late_subscriber_replays_events_to_the_current_cache(
    bus: Bus, nats_client: NatsClient
) -> None:
    core = new_core(20, KVEvents())
    live: list[bytes] = []

    async def receive(msg: Any) -> None:
        live.append(msg.data)

    await nats_client.subscribe(subjects.KV_FILTER, cb=receive)
    await nats_client.flush()
    config = EngineConfig(max_num_seqs=4, kv_events=True)
    async with serving_engine(bus, "kv", config, core=core) as rig:
        engine = rig.context.worker
        # More blocks than the pool has, so that some are evicted.
        names = [f"kv-{secrets.token_hex(8)}" for _ in range(12)]
        for i, name in enumerate(names):
            await rig.put(name, [1 + i % 5, *range(1, 8)])
        for name in names:
            records = [record async for record in follow(bus, name)]
            assert isinstance(records[-1], Finish)
    findable = Findable()
    numbers: list[int] = []
    while findable.hashes != registered(core) or not numbers:
        findable, numbers = Findable(), []
        for number, payload in await replay(bus, engine):
            numbers.append(number)
            findable.apply(decode(payload))
    assert core.stats().prefix_evictions > 0
    assert numbers == list(range(len(numbers)))
    assert [n for n, _ in await replay(bus, engine, 3)] == numbers[3:]
    await until(lambda: [number for number, _ in map(split_message, live)] == numbers)
