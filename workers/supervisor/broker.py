"""The embedded broker of `pagemill up`: its keys, restarts, streams and repair."""

import asyncio
import shutil
from pathlib import Path

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.local_keys import note_keys
from shared.bus.store_probes import PROBE_S
from shared.bus.store_room import measure_folder, report_room
from shared.config.schema import Config
from shared.errors import PagemillError
from shared.protocol.full_stores import FullStore
from workers.keyring import DEFAULT_TENANT, Keyring
from workers.settings import keys_folder

CHECK_S = 0.2
# Two of the largest messages.
MIN_ROOM_BYTES = 16 * 2**20
# A restart ends all connections, so one that does not help must not be repeated at once.
PAUSE_S = 30.0

_log = structlog.get_logger()


def start_embedded(config: Config) -> EmbeddedServer:
    """Start the embedded server, which accepts only clients with one of its keys.

    Raises ConfigError or Unavailable.
    """
    keyring = Keyring(keys_folder(config), config.nats)
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


async def keep_running(broker: EmbeddedServer) -> None:
    """Start the broker again whenever its process has ended, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_S)
        if broker.has_exited:
            _log.warning("broker_ended", url=broker.url)
            try:
                await asyncio.to_thread(broker.start)
            except PagemillError as error:
                _log.error("broker_not_started", reason=error.message)


async def fit_streams(bus: Bus, config: Config) -> None:
    """Change the streams of the embedded broker to the configuration, like `pagemill migrate`.

    A limit below the size of the stored messages is left to that command. Raises Unavailable.
    """
    bus.streams.configure(config.nats, config.delivery, config.agent, config.batch)
    changes = await bus.streams.find_changes(bus.now_ms())
    # A coordinator creates the missing streams.
    await bus.streams.change([c for c in changes if c.difference.setting and not c.shrinks])
    for change in changes:
        if change.shrinks:
            _log.warning(
                "stream_not_shrunk",
                stream=change.difference.stream,
                setting=change.difference.setting,
                effect=change.effect,
                hint="pagemill migrate --shrink",
            )


async def watch_disk(bus: Bus, config: Config, broker: EmbeddedServer) -> None:
    """Report when the disk of the broker has too little free space. Never returns."""

    async def measure() -> list[FullStore]:
        # A disk that does not respond blocks the thread.
        return await asyncio.to_thread(measure_folder, broker.store_dir, config.nats)

    await report_room(bus, measure)


async def repair_broker(bus: Bus, config: Config, broker: EmbeddedServer) -> None:
    """End the broker's process when a stream needs a restart. `keep_running` starts it again."""
    bus.streams.configure(config.nats, config.delivery, config.agent, config.batch)
    while True:
        await asyncio.sleep(PROBE_S)
        refusals = await bus.streams.probe()
        reasons = {stream: r.reason for stream, r in refusals.items() if r.needs_restart}
        if reasons and shutil.disk_usage(broker.store_dir).free >= MIN_ROOM_BYTES:
            _log.error("broker_restarted", reasons=reasons)
            await asyncio.to_thread(broker.end_process)
            await asyncio.sleep(PAUSE_S)
