"""`pagemill batch run --up`: one command that starts Pagemill, runs a file, and stops it."""

import json
import os
import signal
from pathlib import Path

import pytest

from shared.bus.embedded_server import free_port, is_listening
from tests import preloaded
from tests.cluster.conftest import CONFIG, ROOT
from tests.support.waiting import wait_until

IMAGES = ROOT / "ops" / "demo_images"
NUM_LINES = 200


@pytest.fixture
def port(tmp_path: Path) -> int:
    (tmp_path / "pagemill.yaml").write_text(CONFIG)
    return free_port()


def env_of(port: int) -> dict[str, str]:
    return os.environ | {"PAGEMILL_NATS__PORT": str(port)}


def test_images_are_read_by_two_commands(tmp_path: Path, port: int) -> None:
    names = ("red.png", "blue.png", "green_circle.png")
    make = ["batch", "make", *(str(IMAGES / name) for name in names)]
    make += ["--prompt", "What color is this image?", "--max-tokens", "16"]
    made = preloaded.run(*make, cwd=tmp_path, env=env_of(port))
    assert made.returncode == 0, made.stderr
    (tmp_path / "in.jsonl").write_text(made.stdout)
    command = ("batch", "run", "in.jsonl", "-o", "out.jsonl", "--up")
    done = preloaded.run(*command, cwd=tmp_path, env=env_of(port), limit_s=300)
    assert done.returncode == 0, done.stderr
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    assert answers.keys() == set(names)
    assert "red" in answers["red.png"].lower()
    assert not is_listening(port)


def test_ctrl_c_stops_everything_and_the_same_command_continues(tmp_path: Path, port: int) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What can you do?"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps(line | {"custom_id": f"line-{n}"}) for n in range(NUM_LINES)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ["batch", "run", "in.jsonl", "-o", "out.jsonl", "--up"]
    part = tmp_path / "out.jsonl.part"
    with (tmp_path / "err").open("wb") as err:
        running = preloaded.start(command, cwd=tmp_path, env=env_of(port), stderr=err)
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        num_before = len(part.read_text().splitlines())
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    assert not is_listening(port)
    assert not part.exists()
    done = preloaded.run(*command, cwd=tmp_path, env=env_of(port), limit_s=300)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {result["custom_id"] for result in results} == {f"line-{n}" for n in range(NUM_LINES)}
    assert len(results) == NUM_LINES
    # Results of the first run were kept.
    assert 0 < num_before <= NUM_LINES
