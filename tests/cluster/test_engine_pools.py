"""Engines of one model in two pools with different settings, which share their queues."""

from pathlib import Path

from shared.bus.bus import Bus
from tests.cluster.conftest import (
    CONFIG,
    answer,
    living,
    request_text,
    start_cluster,
    stop_cluster,
    stopped,
)
from tests.cluster.streams import text_of

POOLS = (
    CONFIG.replace(
        "max_model_len: 1024",
        "max_model_len: 1024\n    pools:\n"
        "      large: {num_blocks: 600, max_num_seqs: 8}\n"
        "      small: {num_blocks: 300}",
    )
    + "engine: {threads: 1, block_size: 4, kernels: torch}\n"
)


async def test_two_pools_of_a_model_answer_its_requests(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path, POOLS)
    bus = await Bus.connect(cluster.url, "test")
    try:
        by_blocks = {int(b.load["blocks"]): b.pid for b in await living(bus, "engine")}
        assert by_blocks.keys() == {600, 300}
        pools = {int(beat.load["blocks"]): beat.pool for beat in await living(bus, "engine")}
        assert pools == {600: "large", 300: "small"}
        greeting = request_text("What is this?", max_tokens=8)
        expected = text_of(await answer(bus, greeting))
        for pid in by_blocks.values():
            with stopped(pid):
                assert text_of(await answer(bus, greeting)) == expected
    finally:
        await bus.close()
        assert stop_cluster(cluster) == 0
