"""The systemd unit fits to the exit codes and the drain of `pagemill up`."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shared.config.schema import DeliveryConfig
from shared.stage.runtime import EXIT_CONFIG
from workers.supervisor.supervisor import STOP_GRACE_S

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "compose" / "pagemill.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_fits_to_signals_drain_and_exit_codes() -> None:
    unit = service()
    assert unit["KillSignal"] == "SIGTERM"
    # Otherwise the broker would end before the workers have drained.
    assert unit["KillMode"] == "mixed"
    assert int(unit["TimeoutStopSec"]) > DeliveryConfig().drain_s + STOP_GRACE_S
    assert int(unit["RestartPreventExitStatus"]) == EXIT_CONFIG
    assert unit["Restart"] == "on-failure"


def test_compose_gives_workers_more_time_to_stop_than_a_drain_takes() -> None:
    for file in (ROOT / "compose").glob("*.y*ml"):
        for name, settings in yaml.safe_load(file.read_text()).get("services", {}).items():
            grace = re.fullmatch(r"(\d+)s", str(settings.get("stop_grace_period", "")))
            # A proxy has no requests: it ends after its connections, which the gateways drain.
            if grace is not None and name != "proxy":
                assert int(grace[1]) > DeliveryConfig().drain_s, f"{file.name}: {name}"


def test_the_page_names_the_lines_of_the_unit() -> None:
    page = (ROOT / "docs" / "operate" / "service.md").read_text(encoding="utf-8")
    unit = service()
    for name in ("Type", "KillMode", "KillSignal", "TimeoutStopSec", "RestartPreventExitStatus"):
        assert f"{name}={unit[name]}" in page


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The check of systemd wants a program that exists."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    unit.write_text(text.replace("/opt/pagemill/.venv/bin/pagemill", sys.executable))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr
