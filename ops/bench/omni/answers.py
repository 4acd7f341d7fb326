"""Measure how soon an answer is heard: from the first record of its text to that of its sound.

`python -m ops.bench.omni.answers [NUMBER]`: a tiny Qwen3-Omni with random weights answers so many
times, one after the other, in NUM_TOKENS tokens. The sound of an answer whose talker waited for the
whole text would begin after the text has ended.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ops.harness import machine
from ops.harness.deployment import deployment, preload_for
from ops.harness.tables import console
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from tests import omni
from workers.roles import WorkerSpec
from workers.supervisor.preloader import Preloader

MODEL, NUM_TOKENS, NUM_FRAMES = "omni", 300, 300
SPECS = [
    WorkerSpec("coordinator"),
    WorkerSpec("renderer"),
    WorkerSpec("engine", MODEL),
    WorkerSpec("engine", MODEL, "talker"),
    WorkerSpec("generator", MODEL, "code2wav"),
]


def make_tree(folder: Path) -> dict[str, Any]:
    """Write a model, and return its configuration."""
    omni.write_qwen3(folder / MODEL)
    stages = {
        "talker": {
            "sampling_defaults": {"temperature": 0.0, "max_tokens": NUM_FRAMES},
            "voices": [omni.VOICES[0]],
        },
        "code2wav": {"chunks": {"first": [4, 10], "size": 25, "left": 25, "right": 1}},
    }
    model = {"path": MODEL, "dtype": "float32", "graph": "qwen3-omni", "stages": stages}
    return {
        "models": {MODEL: model},
        "engine": {"threads": 1, "kv_cache_mib": 64},
        "generator": {"threads": 1},
        "log_level": "warning",
    }


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


async def run(
    tree: dict[str, Any], folder: Path, preloader: Preloader | None, number: int
) -> list[tuple[float, float]]:
    async with (
        deployment(tree, workers=SPECS, preloader=preloader, folder=folder) as site,
        site.bus() as bus,
    ):
        await answer(bus, "Hi")
        return [await answer(bus, f"What are {n} circles?") for n in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, nargs="?", default=8)
    number = parser.parse_args().number
    logs.configure_logging("error", role="bench")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        folder, tree = Path(name), make_tree(Path(name))
        answers = asyncio.run(run(tree, folder, preload_for(tree, folder), number))
    sound, text = (statistics.median(column) for column in zip(*answers, strict=True))
    console.print(
        f"{number} answers of {NUM_TOKENS} tokens: the first sound comes {sound:.0f} ms after"
        f" the first token, and the text ends {text:.0f} ms after it"
    )
    console.print(machine.describe())


if __name__ == "__main__":
    main()
