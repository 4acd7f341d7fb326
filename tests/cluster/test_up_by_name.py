"""From an empty cache to an answer: pull a model, list it, serve it by name, ask it over HTTP."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx

from tests.cli.hub_server import Hub
from tests.cluster.conftest import FORKED_PAGEMILL, ROOT
from workers.cli.ask import data_url

DEMO = ROOT / "ops" / "demo_model"
NAME = "org/demo"
RED = ROOT / "ops" / "demo_images" / "red.png"


def test_a_pulled_model_is_served_by_its_name(tmp_path: Path) -> None:
    env = os.environ | {
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
        "PAGEMILL_NATS__PORT": "0",
        "PAGEMILL_GATEWAY__PORT": "0",
        "COLUMNS": "300",
    }

    def run(*arguments: str) -> str:
        command = [*FORKED_PAGEMILL, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    files = {file.name: file.read_bytes() for file in DEMO.iterdir()}
    with Hub({NAME: files}) as hub:
        env["HF_ENDPOINT"] = hub.url
        run("pull", NAME)
    # A pulled model is served without the hub.
    assert "here" in next(line for line in run("models").splitlines() if NAME in line)
    errors = tmp_path / "said"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*FORKED_PAGEMILL, "run", NAME],
            cwd=tmp_path,
            env=env,
            stderr=stderr,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        deadline = time.monotonic() + 150
        while b"ready at" not in errors.read_bytes():
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.1)
        text = errors.read_text()
        assert f"{NAME}: weights 10.5 MB as float32, max_model_len 4096, KV cache 120 MiB" in text
        nats, url = text.partition("ready at ")[2].splitlines()[0].split(" and ")
        question = {"type": "text", "text": "What color is this image?"}
        image = {"type": "image_url", "image_url": {"url": data_url(RED)}}
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": [image, question]}],
            "temperature": 0,
            "max_tokens": 32,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert "red" in answer["choices"][0]["message"]["content"].lower(), answer
        rows = map(json.loads, run("models", "--json", "--nats", nats).splitlines())
        assert {row["name"]: row["state"] for row in rows} == {NAME: "served"}
        # Commands in this folder know the model.
        said = run("ask", f"What color is this image? @{RED}", "--nats", nats)
        assert "red" in said.lower()
        # Ctrl-C reaches the conversation, which handles it, and not the cluster.
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(f"What color is this? @{RED}\n", timeout=60)
        assert "red" in said.lower()
    finally:
        process.terminate()
        assert process.wait(30) == 0, errors.read_text()
    rows = map(json.loads, run("models", "--json").splitlines())
    assert {row["name"]: row["state"] for row in rows} == {"demo": "configured", NAME: "here"}
