"""The resources of a process, as the chaos runs count them."""

import asyncio
import socket
from functools import partial

from ops.chaos.worker.resources import take_snapshot
from shared.blobs.server import BlobServer
from shared.bus.bus import Bus
from tests.support.waiting import until


async def test_no_connection_changes_the_number_of_tasks(bus: Bus) -> None:
    """A reader of the arena has a task. A connection between the ranks of an engine has none."""
    snapshot = partial(take_snapshot, "engine", bus)
    server = BlobServer("owner", 2**20)
    server.start()
    await until(lambda: "BlobServer._accept" in snapshot().task_names)
    before = snapshot()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as reader,
    ):
        reader.connect("\0" + server.address.local)
        tasks = asyncio.all_tasks
        await until(lambda: len(tasks()) > before.tasks)
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert snapshot().readers == before.readers + 2
            assert snapshot().task_names == before.task_names
            assert snapshot().tasks == before.tasks
    await server.close()
