"""Commands that open the store of the embedded broker while another process has it open."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.embedded_server import EmbeddedServer
from shared.protocol.encoding import to_json
from tests import preloaded
from workers import settings
from workers.cli.backup.manifest import FORMAT, MANIFEST_FILE, Manifest


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """The process that has started a broker, whose port the configuration does not have."""
    (tmp_path / "pagemill.yaml").write_text(
        f"models: {{demo: {{path: {settings.DEMO_MODEL}}}}}\nnats: {{port: 0}}\n"
        "gateway: {port: 0}\n"
    )
    backup = tmp_path / "backup"
    backup.mkdir()
    (backup / MANIFEST_FILE).write_bytes(to_json(Manifest(FORMAT, "", "", 0, {}, [])))
    server = EmbeddedServer(tmp_path / "data" / "nats")
    server.start()
    yield os.getpid()
    server.stop()


@pytest.mark.parametrize("command", [["up"], ["restore", "backup"]])
def test_a_store_in_use_is_refused_with_its_process(
    command: list[str], holder: int, tmp_path: Path
) -> None:
    done = preloaded.run(*command, cwd=tmp_path)
    assert "store_in_use" in done.stderr
    assert f"is in use by process {holder}" in " ".join(done.stderr.split())
    # The other process may end, so a service manager starts the command again.
    assert done.returncode == 1
