"""Restarts of the embedded broker, when it refuses to store although its disk has room."""

import asyncio
import shutil

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.store_probes import PROBE_S
from shared.config.schema import Config

# Two of the largest messages.
MIN_ROOM_BYTES = 16 * 2**20
# A restart ends all connections. Where it does not help, it must not be repeated at once.
PAUSE_S = 30.0

_log = structlog.get_logger()


async def repair_broker(bus: Bus, config: Config, broker: EmbeddedServer) -> None:
    """End the broker's process whenever a stream needs that; its supervisor starts it again."""
    bus.configure_streams(config.nats, config.delivery, config.agent)
    while True:
        await asyncio.sleep(PROBE_S)
        refusals = await bus.probe_streams()
        reasons = {stream: r.reason for stream, r in refusals.items() if r.needs_restart}
        if reasons and shutil.disk_usage(broker.store_dir).free >= MIN_ROOM_BYTES:
            _log.error("broker_restarted", reasons=reasons)
            await asyncio.to_thread(broker.end_process)
            await asyncio.sleep(PAUSE_S)
