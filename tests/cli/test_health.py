"""`pagemill health`, as a container's health check runs it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.net.listening import listen_on_first
from shared.protocol.encoding import to_json
from shared.protocol.worker_status import WorkerStatus
from shared.telemetry.prometheus import MetricsEndpoint
from tests import preloaded
from tests.cluster.conftest import ROOT
from tests.gateway.conftest import free_port
from workers.cli.commands import health


@contextlib.contextmanager
def worker(role: str, port: int, *, lives: bool = True, is_ready: bool = True) -> Iterator[None]:
    """Answer as a worker would, on the first free port from `port` on."""

    def report(is_ok: bool, otherwise: str) -> tuple[bool, bytes]:
        status = WorkerStatus(role, f"{role}-1", "ok" if is_ok else otherwise)
        return is_ok, to_json(status)

    probes = {
        "health": lambda: report(lives, "hangs"),
        "ready": lambda: report(lives and is_ready, "starting"),
    }
    endpoint = MetricsEndpoint(list, listen_on_first("metrics", "127.0.0.1", port, 64), probes)
    try:
        yield
    finally:
        endpoint.close()


@pytest.fixture
def port(tmp_path: Path) -> int:
    """A port from which this folder's configuration has workers listen."""
    port = free_port()
    (tmp_path / "pagemill.yaml").write_text(
        f"models: {{demo: {{path: demo}}}}\nmetrics: {{listen: 127.0.0.1, port: {port}}}\n"
    )
    return port


def check(folder: Path, *arguments: str) -> tuple[int, str]:
    done = preloaded.run("health", *arguments, cwd=folder)
    return done.returncode, done.stdout


def test_all_workers_of_the_machine_have_to_be_well(tmp_path: Path, port: int) -> None:
    with worker("engine", port, is_ready=False), worker("renderer", port):
        assert check(tmp_path) == (0, "engine-1: ok\nrenderer-1: ok\n")
        assert check(tmp_path, "--ready") == (1, "engine-1: starting\nrenderer-1: ok\n")
        assert check(tmp_path, "renderer", "--ready") == (0, "renderer-1: ok\n")
    with worker("engine", port, lives=False):
        assert check(tmp_path) == (1, "engine-1: hangs\n")
    code, message = check(tmp_path, "engine")
    assert (code, message.startswith("no engine answers")) == (1, True)


def test_a_worker_shows_its_version_and_the_versions_that_it_reads(
    tmp_path: Path, port: int
) -> None:
    status = WorkerStatus("engine", "engine-1", "ok", "0.2.0", (1, 3))
    probes = {"health": lambda: (True, to_json(status))}
    endpoint = MetricsEndpoint(list, listen_on_first("metrics", "127.0.0.1", port, 64), probes)
    try:
        line = "engine-1: ok, version 0.2.0 reads messages of versions 1-3\n"
        assert check(tmp_path) == (0, line)
    finally:
        endpoint.close()


def test_a_listener_of_another_program_is_no_worker(tmp_path: Path, port: int) -> None:
    endpoint = MetricsEndpoint(list, listen_on_first("metrics", "127.0.0.1", port, 1))
    try:
        assert check(tmp_path)[0] == 1
    finally:
        endpoint.close()


def test_a_worker_that_does_not_answer_is_not_well(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", port)):
        assert health.health("engine", config=tmp_path / "pagemill.yaml") == 1
    assert capsys.readouterr().out == f"127.0.0.1:{port}: no answer\n"


def test_workers_without_a_known_port_cannot_be_asked(tmp_path: Path) -> None:
    done = preloaded.run("health", cwd=tmp_path)
    assert done.returncode == 1
    assert "metrics.port" in done.stderr


def test_a_health_check_imports_neither_the_broker_nor_a_model_library(
    tmp_path: Path, port: int
) -> None:
    script = (
        "import sys; sys.argv = ['pagemill', 'health']; from workers.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'nats', 'torch', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
