"""Measure how soon an answer is heard: from the first record of its text to that of its sound.

`python -m ops.bench.omni.answers [NUMBER]`: a tiny Qwen3-Omni with random weights answers so many
times, one after the other, in NUM_TOKENS tokens. The sound of an answer whose talker waited for the
whole text would begin after the text has ended.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cyclopts import App

from ops.bench.omni.durable import running
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from tests import omni
from workers import settings
from workers.cli.commands.worker import worker
from workers.cli.terminal import run_app
from workers.roles import WorkerSpec
from workers.supervisor.preloader import Preloader, fork_preloader

MODEL, NUM_TOKENS, NUM_FRAMES = "omni", 300, 300
SPECS = [
    WorkerSpec("coordinator"),
    WorkerSpec("renderer"),
    WorkerSpec("engine", MODEL),
    WorkerSpec("engine", MODEL, "talker"),
    WorkerSpec("generator", MODEL, "code2wav"),
]


def write_config(folder: Path) -> Path:
    omni.write_qwen3(folder / MODEL)
    stages = {
        "talker": {
            "sampling_defaults": {"temperature": 0.0, "max_tokens": NUM_FRAMES},
            "voices": [omni.VOICES[0]],
        },
        "code2wav": {"chunks": {"first": [4, 10], "size": 25, "left": 25, "right": 1}},
    }
    file = folder / "pagemill.yaml"
    tree = {
        "models": {
            MODEL: {"path": MODEL, "dtype": "float32", "graph": "qwen3-omni", "stages": stages}
        },
        "engine": {"threads": 1, "kv_cache_mib": 64},
        "generator": {"threads": 1},
        "nats": {"port": 0, "store_dir": str(folder / "nats")},
        "log_level": "warning",
    }
    file.write_bytes(msgspec.json.encode(tree))
    return file


async def answer(bus: Bus, question: str) -> tuple[float, float]:
    """Milliseconds from the first record of a text to that of its sound, and to the text's end."""
    request_id = client.new_request_id()
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest(
        MODEL,
        prompt_token_ids=omni.user_prompt(question),
        sampling_params=sampling,
        outputs=["text", "audio"],
        timeout_s=120.0,
    )
    _ = [record async for record in client.ask(bus, request, request_id)]
    text = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    audio = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "audio"))
    # The last record of a text is the request's end, behind all outputs.
    return audio[0].stored_ms - text[0].stored_ms, text[-2].stored_ms - text[0].stored_ms


async def run(number: int, preloader: Preloader) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        file = write_config(Path(name))
        async with running(settings.load_config(file), file, SPECS, preloader) as (bus, _):
            await answer(bus, "Hi")
            return [await answer(bus, f"What are {n} circles?") for n in range(number)]


def print_report(found: Sequence[tuple[float, float]]) -> None:
    sound, text = (statistics.median(column) for column in zip(*found, strict=True))
    sys.stdout.write(
        f"{len(found)} answers of {NUM_TOKENS} tokens: the first sound comes {sound:.0f} ms after"
        f" the first token, and the text ends {text:.0f} ms after it\n"
    )


def _run_worker() -> None:
    forked = App(name="pagemill")
    forked.command(worker)
    run_app(forked)


def main(number: int = 8) -> None:
    # Before there is a thread or an event loop.
    modules = ["workers.engine.main", "workers.generator.speech_worker"]
    preloader = fork_preloader(modules, _run_worker)
    logs.configure_logging("error", role="bench")
    print_report(asyncio.run(run(number, preloader)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
