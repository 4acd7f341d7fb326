"""The embedded broker of a configuration, with its keys, and its repair."""

import asyncio
import shutil
from pathlib import Path

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.local_keys import note_keys
from shared.bus.store_probes import PROBE_S
from shared.config.schema import Config
from workers.keyring import DEFAULT_TENANT, Keyring
from workers.settings import keys_folder

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


def start_embedded(config: Config) -> EmbeddedServer:
    """Start the embedded server, which accepts only those who have one of its keys.

    Raises ConfigError or Unavailable.
    """
    keyring = Keyring(keys_folder(config), config.nats.tenant_connections)
    # A tenant of the first start may have been removed since.
    keyring.complete([] if keyring.accounts_file.exists() else [DEFAULT_TENANT])
    broker = EmbeddedServer(
        Path(config.nats.store_dir).absolute(),
        config.nats.port,
        accounts_file=keyring.accounts_file,
    )
    broker.start()
    note_keys(broker.port, keyring.folder)
    return broker
