"""`pagemill upgrade`: the order in which workers are restarted."""

from pathlib import Path

from shared.bus.stream_changes import Difference, StreamChange
from shared.protocol.messages import Heartbeat
from shared.stage.runtime import VERSION
from workers import settings
from workers.cli.commands.upgrade import plan_upgrade
from workers.keyring import Keyring

WORKERS = ("gateway", "coordinator", "renderer", "engine", "talker", "code2wav", "encoder")


def beat(name: str) -> Heartbeat:
    stages = {"talker": "engine", "code2wav": "generator"}
    role = stages.get(name, name)
    stage = name if name in stages else ""
    version = VERSION if name == "talker" else "0.0.9"
    return Heartbeat(role, f"{name}-1", version, 1, ["demo"], {}, stage=stage)


def test_the_last_stages_are_restarted_first(tmp_path: Path) -> None:
    Keyring(tmp_path / "keys").complete()
    file = tmp_path / "pagemill.yaml"
    demo = settings.EMBEDDED.replace("    stages:", "    tower: encoder\n    stages:", 1)
    file.write_text(f"{demo}nats: {{url: 'nats://127.0.0.1:1', keys: keys}}\n")
    change = StreamChange(Difference("TOKENS", "max_bytes", 1, 2), "keeps all")
    steps = list(plan_upgrade(settings.load_config(file), [change], list(map(beat, WORKERS))))
    assert [(step.number, step.target, step.state) for step in steps] == [
        (1, "keys", "done"),
        (2, "streams", "left"),
        (3, "generator code2wav", "left"),
        (4, "engine talker", "done"),
        (5, "engine", "left"),
        (6, "encoder", "left"),
        (7, "renderer", "left"),
        (8, "coordinator", "left"),
        (9, "gateway", "left"),
    ]
    (tmp_path / "keys" / "accounts.conf").write_text("older")
    assert next(plan_upgrade(settings.load_config(file), [], [])).state == "left"
