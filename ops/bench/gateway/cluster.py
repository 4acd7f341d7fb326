"""Pagemill on this machine, as the benchmarks over HTTP start it."""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from ops.bench.servers import MODEL
from shared.bus.bus import Bus
from workers import settings
from workers.roles import WorkerSpec, default_workers
from workers.supervisor.cluster import LocalCluster


@contextlib.asynccontextmanager
async def local_gateway(
    model: Path, folder: Path, max_model_len: int, engine: Mapping[str, object] | None = None
) -> AsyncIterator[tuple[LocalCluster, Bus]]:
    """Run all roles and a gateway on a model with room for 32 sequences.

    `engine` has further settings of the engine.
    """
    file = folder / "pagemill.yaml"
    served = {"path": str(model), "dtype": "bfloat16", "max_model_len": max_model_len}
    if model == settings.DEMO_MODEL:
        served |= {"dtype": "float32"}
    tree = {
        "models": {MODEL: served},
        "engine": {
            "threads": os.cpu_count(),
            "kv_cache_mib": 1024,
            "max_num_seqs": 32,
            **(engine or {}),
        },
        "nats": {"port": 0, "store_dir": str(folder / "nats")},
        "gateway": {"port": 0},
    }
    file.write_bytes(msgspec.json.encode(tree))
    config = settings.load_config(file)
    workers = [*default_workers(config), WorkerSpec("gateway")]
    cluster = LocalCluster(config, file, workers, log_file=folder / "workers.log")
    try:
        await cluster.start()
        bus = await Bus.connect(cluster.url, "bench")
        yield cluster, bus
        await bus.close()
    finally:
        await cluster.stop()
