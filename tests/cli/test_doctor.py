"""`pagemill doctor`: a line for each finding, with the remedy."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from workers import settings
from workers.cli.commands import doctor as command
from workers.cli.commands.doctor import doctor
from workers.cli.options import load

Row = dict[str, str]


async def examine(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str | None = None, **tree: object
) -> tuple[int, dict[str, Row]]:
    """Return the exit code of the command, and its first finding of each check."""
    file = folder / "pagemill.yaml"
    file.write_text(yaml.safe_dump({"models": {"a": {"path": "nowhere"}}} | tree))
    code = await doctor(json=True, config=file, nats=url)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {row["check"]: row for row in reversed(rows)}


async def test_each_fault_of_a_machine_has_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "engine.nk").write_text("SU")
    (keys / "engine.nk").chmod(0o644)
    (tmp_path / "store").touch()
    nats = {"port": 1, "store_dir": str(tmp_path / "store"), "keys": str(keys)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = {"port": taken.getsockname()[1]}
        code, found = await examine(tmp_path, capsys, gateway=gateway, nats=nats)
    assert code == 1
    assert found["keys"]["remedy"].startswith(f"run `chmod 600 {keys}/engine.nk`")
    assert "nowhere: it has no config.json" in found["models"]["text"]
    assert found["disk"]["text"] == f"{tmp_path / 'store'} is not a folder"
    assert "gateway.port" in found["ports"]["text"]
    assert (found["broker"]["state"], found["broker"]["text"]) == (
        "note",
        "nothing listens on port 1",
    )


async def test_the_settings_are_read_as_by_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used = tmp_path / "of_up.yaml"
    for file in (used, tmp_path / "pagemill.yaml"):
        file.touch()
    (tmp_path / "data" / "nats").mkdir(parents=True)
    settings.set_running(used, 4223)
    async with contextlib.aclosing(command.examine(None, None)) as findings:
        first = [await anext(findings) for _ in range(3)]
    assert (first[-1].check, first[-1].text) == ("settings", str(used))
    assert load(None).nats.port == load(used).nats.port == 4223
    assert load(tmp_path / "pagemill.yaml").nats.port == 4222
    monkeypatch.setenv(settings.NATS_PORT, "4333")
    assert load(None).nats.port == 4333


async def test_a_broker_without_workers_is_described(
    tmp_path: Path, own_broker: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = await examine(tmp_path, capsys, own_broker.url, gateway={"port": 0})
    assert found["streams"]["remedy"] == "the first coordinator creates them"
    assert found["workers"]["text"] == "none runs"
    assert found["ports"]["state"] == "ok"


class OtherServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


async def test_another_server_is_no_gateway(
    tmp_path: Path, broker: EmbeddedServer, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        beat = Heartbeat("gateway", "gateway-1", "1", 1, [], {}, url=url)
        await bus.heartbeats.publish(beat.worker, to_json(beat))
        code, found = await examine(tmp_path, capsys, broker.url)
        server.shutdown()
    assert code == 1
    assert found["gateway"]["text"].startswith(f"{url} does not answer as a gateway does: Object")
