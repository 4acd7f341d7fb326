"""Run the examples of docs/reference/http-api.md, as a reader would type them."""

import re
import subprocess
from pathlib import Path

from tests.cluster.conftest import ROOT
from tests.gateway.conftest import Gateway, needs_curl

PAGE = ROOT / "docs" / "reference" / "http-api.md"
BLOCKS = re.findall(r"```\n(curl .*?)```", PAGE.read_text(), re.DOTALL)


@needs_curl
def test_every_command_of_the_reference_works(gateway: Gateway, tmp_path: Path) -> None:
    """The examples run in order, because some use the results of others."""
    assert len(BLOCKS) >= 6
    (tmp_path / "ops").symlink_to(ROOT / "ops")
    for block in BLOCKS:
        commands = block.replace("http://127.0.0.1:8000", gateway.url)
        commands = re.sub(r"^curl ", "curl -sS --fail-with-body ", commands, flags=re.MULTILINE)
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=tmp_path, capture_output=True, timeout=60
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        assert done.stdout
        assert b'"error"' not in done.stdout, (block, done.stdout)
