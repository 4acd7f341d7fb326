"""Restores of streams, as far as a single broker cannot show them."""

import asyncio
import json
from pathlib import Path

import nats
from nats.aio.msg import Msg

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.snapshots import StreamSnapshots


async def test_a_restore_waits_until_its_listener_is_known(tmp_path: Path) -> None:
    """In a cluster, the name of a subject may arrive before the interest in it."""
    config = tmp_path / "nats.conf"
    config.write_text("port: $NATS_PORT\n")
    server = EmbeddedServer(tmp_path / "broker", config_file=config)
    server.start()
    bus = await Bus.connect(server.url, "restoring")
    listener = await nats.connect(server.url)
    received: list[bytes] = []

    async def answer(message: Msg) -> None:
        received.append(message.data)
        await message.respond(b"" if message.data else b'{"state": {"messages": 7}}')

    async def name_subject(message: Msg) -> None:
        await message.respond(json.dumps({"deliver_subject": "later"}).encode())
        await asyncio.sleep(0.3)
        await listener.subscribe("later", cb=answer)

    try:
        # The broker has no JetStream, and the listener is in its place.
        await listener.subscribe("$JS.API.STREAM.RESTORE.LOGS", cb=name_subject)
        await listener.flush()
        assert await StreamSnapshots(bus).restore_snapshot("LOGS", {}, {}, [b"one"]) == 7
        assert received == [b"one", b""]
    finally:
        await listener.close()
        await bus.close()
        server.stop()
