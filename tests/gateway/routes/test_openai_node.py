"""The `openai` package of npm against a gateway. Its requests are in node/scenarios.mjs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_auth import ALICE, KEYS
from tests.gateway.routes.test_chat import star_url

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")

SOURCE = Path(__file__).parent / "node"
SCENARIOS = ("chat", "embeddings", "stream", "image", "tools", "json_schema", "errors", "cancel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the package is installed."""
    installed = tmp_path_factory.mktemp("node")
    for file in SOURCE.iterdir():
        shutil.copy(file, installed)
    quiet = ("--no-audit", "--no-fund", "--fetch-retries=0")
    done = run("npm", "ci", "--prefix", str(installed), *quiet)
    # The registry cannot be reached, for example because a proxy's certificate is unknown.
    if unreached := re.search(r"request to \S+ failed, reason: .*", done.stderr):
        pytest.skip(f"npm could not reach its registry: {unreached[0]}")
    assert done.returncode == 0, done.stderr
    return installed


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=100, check=False
    )


def play(folder: Path, scenario: str, gateway: Gateway, **env: str) -> None:
    script = str(folder / "scenarios.mjs")
    done = run("node", script, scenario, BASE_URL=f"{gateway.url}/v1", IMAGE=star_url(), **env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_gateway_without_keys(folder: Path, gateway: Gateway, scenario: str) -> None:
    play(folder, scenario, gateway)


def test_retries(folder: Path, another: Start) -> None:
    gateway = another(api_keys=[KEYS[0] | {"max_concurrent": 1}])
    play(folder, "retries", gateway, KEY=ALICE)
