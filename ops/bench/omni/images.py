"""Images through the queue, and by a plain loop over the same painter with random weights."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from shared import client
from shared.bus.bus import Bus
from shared.protocol.images import ImageParams, PaintParams, parse_size
from shared.protocol.records import Finish
from shared.protocol.requests import GenerateRequest
from workers import settings
from workers.generator.core.denoising import Condition, ImageModel, Progress, Step, noise_of
from workers.generator.image_worker import to_png
from workers.generator.painter import Painter
from workers.generator.painter_model import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    PainterConfig,
    load_painter,
)
from workers.roles import WorkerSpec

MODEL, STAGE, OUTPUT, SIZE = "painter", "dit", "image", "64x64"
SPECS = [WorkerSpec("coordinator"), WorkerSpec("generator", MODEL, STAGE)]
PARAMS = PaintParams(SIZE)


class Prompt(NamedTuple):
    """An image to paint. A cluster caches the image of a prompt and a seed."""

    text: str
    seed: int


def write_painter(folder: Path) -> None:
    """Write a painter of 1.5 M parameters, in float32."""
    folder.mkdir()
    tokenizer = settings.DEMO_MODEL / TOKENIZER_FILE
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.read_bytes())
    num_tokens = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    config = PainterConfig("pagemill_painter", 160, 4, 4, num_tokens, 24, 0, 2)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    torch.manual_seed(0)
    save_file(Painter(config.shape).state_dict(), folder / WEIGHTS_FILE)


def model_config(folder: Path) -> dict[str, object]:
    """The configuration of a model that paints with this painter."""
    return {
        "path": str(settings.DEMO_MODEL),
        "stages": {
            "renderer": {"enabled": False},
            "engine": {"enabled": False},
            STAGE: {
                "role": "generator",
                "path": str(folder),
                "inputs": {"prompt": {"from": "request", "function": "paint"}},
                "output": {"name": OUTPUT, "kind": "image"},
                "sizes": [SIZE],
            },
        },
    }


@dataclass(slots=True)
class _Canvas:
    """An image that is being painted."""

    prompt: Condition
    negative: Condition
    progress: Progress
    step: int = 0

    def next_step(self) -> Step:
        return Step(
            self.progress,
            self.prompt,
            self.negative,
            PARAMS.guidance,
            parse_size(SIZE),
            self.step,
            PARAMS.steps,
        )


class PlainPainter:
    """Paints in this process, without a queue or a log."""

    def __init__(self, folder: Path) -> None:
        self._model: ImageModel = load_painter(folder, "float32", [SIZE], STAGE)

    def paint(self, prompts: Sequence[Prompt], at_once: int) -> float:
        """Paint all images; return the images of a minute."""
        began_s, waiting = time.perf_counter(), deque(prompts)
        open_: list[_Canvas] = []
        while waiting or open_:
            while waiting and len(open_) < at_once:
                open_.append(self._begin(waiting.popleft()))
            results = self._model.step([canvas.next_step() for canvas in open_])
            for canvas, result in zip(open_, results, strict=True):
                canvas.progress, canvas.step = result.progress, canvas.step + 1
                if canvas.step == PARAMS.steps:
                    to_png(self._model.pixels(canvas.progress.latents, parse_size(SIZE)))
            open_ = [canvas for canvas in open_ if canvas.step < PARAMS.steps]
        return 60 * len(prompts) / (time.perf_counter() - began_s)

    def _begin(self, prompt: Prompt) -> _Canvas:
        size = parse_size(SIZE)
        noise = noise_of(prompt.seed, 0, self._model.noise_shape(size))
        condition, negative = self._model.encode([prompt.text, self._model.empty_negative or ""])
        return _Canvas(condition, negative, self._model.begin(size, noise))


async def paint_by_queue(bus: Bus, prompts: Sequence[Prompt], at_once: int) -> float:
    """Have workers paint all images; return the images of a minute."""
    began_s, waiting = time.perf_counter(), deque(prompts)

    async def paint_some() -> None:
        while waiting:
            text, seed = waiting.popleft()
            image = ImageParams(SIZE, seed=seed)
            request = GenerateRequest(
                MODEL, prompt=text, outputs=[OUTPUT], image=image, timeout_s=60.0
            )
            log = client.ask(bus, request, client.new_request_id())
            last = [record async for record in log][-1]
            if not isinstance(last, Finish):
                raise SystemExit(f"an image has failed: {last}")

    await asyncio.gather(*(paint_some() for _ in range(at_once)))
    return 60 * len(prompts) / (time.perf_counter() - began_s)
