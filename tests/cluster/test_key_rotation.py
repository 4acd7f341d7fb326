"""Keys that are replaced while requests are answered: seen through real processes."""

import asyncio
import os
from pathlib import Path

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.bus.login import Login, seed_file
from shared.client import ask, new_request_id
from shared.errors import Unavailable
from shared.protocol.permissions import OPERATOR
from shared.protocol.records import Finish, LogRecord
from tests import preloaded
from tests.cluster.conftest import ROOT, living, request_text, start_cluster, stop_cluster
from tests.cluster.streams import assert_gapless, tokens_of

LONG = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=200)


async def collect(bus: Bus, request_id: str, begun: asyncio.Event) -> list[LogRecord]:
    records = []
    async for record in ask(bus, LONG, request_id):
        records.append(record)
        begun.set()
    return records


async def test_no_request_is_lost_while_all_keys_are_replaced(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path)
    bus = await Bus.connect(cluster.url, "test")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env["PAGEMILL_NATS__PORT"] = cluster.url.rpartition(":")[2]
    old = tmp_path / "old.nk"
    old.write_bytes(seed_file(cluster.keys, "engine").read_bytes())
    roles = ("coordinator", "renderer", "engine", "gateway")
    try:
        before = {role: [beat.pid for beat in await living(bus, role)] for role in roles}
        for _ in range(2):
            ids, begun = [new_request_id() for _ in range(4)], asyncio.Event()
            answers = [asyncio.create_task(collect(bus, name, begun)) for name in ids]
            await begun.wait()
            done = await asyncio.to_thread(preloaded.run, "keys", "rotate", cwd=tmp_path, env=env)
            assert done.returncode == 0, done.stderr
            assert "engine.nk" in done.stdout
            first, *others = await asyncio.gather(*answers)
            for request_id, records in zip(ids, (first, *others), strict=True):
                assert_gapless(records)
                assert isinstance(records[-1], Finish)
                assert tokens_of(records) == tokens_of(first)
                assert await read_log(bus, request_id) == records
        assert before == {role: [beat.pid for beat in await living(bus, role)] for role in roles}
        for identity in ("engine", OPERATOR):
            with pytest.raises(Unavailable, match="refuses this login"):
                await Bus.connect(Login(cluster.url, identity, old), "test", 0.3)
    finally:
        await bus.close()
        assert stop_cluster(cluster) == 0
