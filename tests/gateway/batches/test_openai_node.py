"""Files and batches with the `openai` package of npm, in routes/node/batches.mjs."""

import shutil
from pathlib import Path

from ops.chaos.agents.scripted_model import MODEL
from tests.gateway.batches.conftest import BatchRig
from tests.gateway.conftest import Process
from tests.gateway.routes.test_openai_node import SOURCE
from tests.npm import install, needs_npm, run


@needs_npm
def test_the_client_of_npm_runs_batches(rig: BatchRig, batcher: Process, tmp_path: Path) -> None:
    for file in SOURCE.iterdir():
        shutil.copy(file, tmp_path)
    install(tmp_path)
    script = str(tmp_path / "batches.mjs")
    done = run("node", script, BASE_URL=f"{rig.gateway.url}/v1", MODEL=MODEL)
    assert done.returncode == 0, done.stderr
