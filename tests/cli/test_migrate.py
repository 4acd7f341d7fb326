"""`pagemill migrate` shows what differs, asks, and does not lose messages by accident."""

import asyncio
import json
import os
import pty
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.state import audit_log
from tests.cli.test_request_commands import run
from tests.cluster.conftest import FORKED_PAGEMILL, ROOT, start_cluster, stop_cluster

CONFIG = "models: {{demo: {{path: nowhere}}}}\ndelivery: {{max_token_log_mib: {mib}}}\n"
NUM_MESSAGES, MESSAGE = 200, bytes(8192)  # more than a mebibyte


@pytest.fixture
async def filled(own_broker: EmbeddedServer) -> AsyncIterator[Bus]:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    for number in range(NUM_MESSAGES):
        await bus.publish_without_id(subjects.append(f"r-{number}"), MESSAGE)
    yield bus
    await bus.close()


async def num_stored(bus: Bus) -> int:
    return (await bus.figures.size(subjects.TOKENS_STREAM))[0]


def write(folder: Path, mib: int) -> str:
    file = folder / f"{mib}.yaml"
    file.write_text(CONFIG.format(mib=mib))
    return str(file)


async def test_nothing_to_change(own_broker: EmbeddedServer, filled: Bus, tmp_path: Path) -> None:
    code, output, _ = await run(own_broker, "migrate", "--config", write(tmp_path, 2048))
    assert (code, output) == (0, "all streams are as configured\n")


async def test_a_difference_is_shown_with_its_effect_and_needs_yes(
    own_broker: EmbeddedServer, filled: Bus, tmp_path: Path, jetstream: JetStreamContext
) -> None:
    config = write(tmp_path, 4096)
    code, output, errors = await run(own_broker, "migrate", "--config", config)
    assert code == 1
    assert "--yes is needed" in errors
    lines = output.splitlines()
    assert lines[0].split() == ["stream", "setting", "is", "will", "be", "effect"]
    assert " ".join(lines[1].split()) == (
        "TOKENS max_bytes 2,048 MiB 4,096 MiB keeps all 200 messages"
    )
    code, output, _ = await run(own_broker, "migrate", "--yes", "--config", config)
    assert (code, output.splitlines()[-1]) == (0, "changed: 1")
    info = await jetstream.stream_info(subjects.TOKENS_STREAM)
    assert info.config.max_bytes == 4096 * 2**20


async def test_less_room_than_is_stored_needs_shrink(
    own_broker: EmbeddedServer, filled: Bus, tmp_path: Path
) -> None:
    config = write(tmp_path, 1)
    code, output, errors = await run(own_broker, "migrate", "--yes", "--config", config)
    assert code == 1
    assert "would delete" in output
    assert "nothing was changed: --shrink sets them" in errors
    assert "TOKENS max_bytes" in errors
    assert await num_stored(filled) == NUM_MESSAGES
    code, _, _ = await run(own_broker, "migrate", "--yes", "--shrink", "--config", config)
    assert code == 0
    assert await num_stored(filled) < NUM_MESSAGES


async def test_json_has_one_object_for_each_difference_and_changes_nothing(
    own_broker: EmbeddedServer, filled: Bus, tmp_path: Path
) -> None:
    code, output, _ = await run(own_broker, "migrate", "--json", "--config", write(tmp_path, 4096))
    assert code == 0
    assert [json.loads(line)["setting"] for line in output.splitlines()] == ["max_bytes"]
    code, again, _ = await run(own_broker, "migrate", "--json", "--config", write(tmp_path, 4096))
    assert again == output


@pytest.mark.parametrize(("answer", "code", "mib"), [("y\n", 0, 4096), ("\n", 1, 2048)])
async def test_the_question_is_answered_at_a_terminal(
    own_broker: EmbeddedServer,
    filled: Bus,
    tmp_path: Path,
    answer: str,
    code: int,
    mib: int,
    jetstream: JetStreamContext,
) -> None:
    terminal, end = pty.openpty()
    arguments = ["migrate", "--config", write(tmp_path, 4096), "--nats", own_broker.url]
    process = await asyncio.create_subprocess_exec(
        *FORKED_PAGEMILL, *arguments, stdin=end, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    os.write(terminal, answer.encode())
    output, _ = await process.communicate()
    assert process.returncode == code, output
    info = await jetstream.stream_info(subjects.TOKENS_STREAM)
    assert info.config.max_bytes == mib * 2**20
    recorded = [entry.record.action async for entry in audit_log.read_newest(filled)]
    assert recorded == ([] if code else ["migrate"])
    os.close(terminal)
    os.close(end)


async def test_up_fits_the_streams_of_its_own_broker_and_loses_nothing(tmp_path: Path) -> None:
    """A changed pagemill.yaml needs no further command, unless messages would be deleted."""
    model = ROOT / "ops" / "demo_model"

    def text(mib: int) -> str:
        return (
            f"models: {{demo: {{path: {model}, max_model_len: 256}}}}\n"
            f"delivery: {{max_token_log_mib: {mib}, drain_s: 1}}\n"
        )

    async def limit_and_number(url: str, *, fill: bool = False) -> tuple[int, int]:
        bus = await Bus.connect(url, "test")
        if fill:
            for number in range(NUM_MESSAGES):
                await bus.publish_without_id(subjects.append(f"r-{number}"), MESSAGE)
        info = await bus.connection.js.stream_info(subjects.TOKENS_STREAM)
        await bus.close()
        return int(info.config.max_bytes or 0) // 2**20, int(info.state.messages)

    cluster = await asyncio.to_thread(start_cluster, tmp_path, text(64))
    assert await limit_and_number(cluster.url, fill=True) == (64, NUM_MESSAGES)
    assert await asyncio.to_thread(stop_cluster, cluster) == 0
    for mib, limit in ((128, 128), (1, 128)):
        cluster = await asyncio.to_thread(start_cluster, tmp_path, text(mib))
        assert await limit_and_number(cluster.url) == (limit, NUM_MESSAGES)
        assert await asyncio.to_thread(stop_cluster, cluster) == 0
    assert "stream_not_shrunk" in cluster.log.read_text()
