"""A temporary Pagemill system with the demo model and a gateway."""

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from shared.telemetry import logs
from workers import settings
from workers.roles import WorkerSpec, default_workers
from workers.supervisor.cluster import LocalCluster

MODEL = Path(__file__).parent / "demo_model"
VOICE = Path(__file__).parent / "demo_voice"
CONFIG = """
models:
  demo:
    path: {model}
    max_model_len: {max_model_len}
    sampling_defaults: {{temperature: 0.0, max_tokens: 64}}
    stages: {stages}
nats: {{store_dir: {folder}/nats, port: 0}}
gateway: {{port: 0}}
"""


@contextlib.asynccontextmanager
async def serving(
    max_model_len: int = 1024, *, spoken: bool = False
) -> AsyncIterator[tuple[str, Path]]:
    """Run a system; yield the gateway's URL and the folder of `workers.log`, removed at the end.

    With `spoken`, the model has the demo voice.
    """
    stages = json.dumps(_voice_stages() if spoken else {})
    with tempfile.TemporaryDirectory(prefix="pagemill-") as name:
        folder = Path(name)
        file = folder / "pagemill.yaml"
        text = CONFIG.format(model=MODEL, folder=folder, max_model_len=max_model_len, stages=stages)
        file.write_text(text)
        config = settings.load_config(file)
        logs.configure_logging("warning", role="serving")
        workers = [*default_workers(config), WorkerSpec("gateway")]
        cluster = LocalCluster(config, file, workers, log_file=folder / "workers.log")
        try:
            await cluster.start()
            assert cluster.gateway_url is not None
            yield cluster.gateway_url, folder
        finally:
            await cluster.stop()


def _voice_stages() -> dict[str, Any]:
    """Return the stages that speak, with absolute paths."""
    tree = yaml.safe_load((VOICE / "pagemill.yaml").read_text())
    stages: dict[str, Any] = tree["models"]["demo"]["stages"]
    return {name: stage | {"path": str(VOICE / stage["path"])} for name, stage in stages.items()}
