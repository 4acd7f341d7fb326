"""The `openai` package of npm against a gateway. Its requests are in node/scenarios.mjs."""

import shutil
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_auth import ALICE, KEYS
from tests.gateway.routes.test_chat import star_url
from tests.npm import install, needs_npm, run

pytestmark = needs_npm

SOURCE = Path(__file__).parent / "node"
SCENARIOS = ("chat", "embeddings", "stream", "image", "tools", "json_schema", "errors", "cancel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the package is installed."""
    installed = tmp_path_factory.mktemp("node")
    for file in SOURCE.iterdir():
        shutil.copy(file, installed)
    install(installed)
    return installed


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
