"""Images through the queue, and by a plain loop over the same painter with random weights."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ops.harness import qwen_images
from shared import client
from shared.bus.bus import Bus
from shared.protocol.images import ImageParams, PaintParams, parse_size
from shared.protocol.records import Finish
from shared.protocol.requests import GenerateRequest
from workers import settings
from workers.generator.core.denoising import Condition, Progress, Step, noise_of
from workers.generator.image_loader import load_image_model
from workers.generator.image_parts import to_png
from workers.generator.painter import Painter
from workers.generator.painter_model import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, PainterConfig
from workers.roles import WorkerSpec

STAGE, OUTPUT = "dit", "image"


class Kind(NamedTuple):
    """A painter, and the parameters of its images."""

    model: str
    """Name of the model, and of its folder."""
    params: PaintParams

    @property
    def worker(self) -> WorkerSpec:
        return WorkerSpec("generator", self.model, STAGE)


OWN = Kind("painter", PaintParams("64x64"))
"""The painter of this project, of 1.5 M parameters."""
QWEN_IMAGE = Kind("qwen-image", PaintParams("96x96", steps=8, guidance=4.0))
"""Qwen-Image by diffusers, with random weights of the width 192."""
KINDS = (OWN, QWEN_IMAGE)
WIDTH = qwen_images.Width(num_heads=6, head=32, num_layers=4)


class Prompt(NamedTuple):
    """An image to paint. A cluster caches the image of a prompt and a seed."""

    text: str
    seed: int


def write_painters(folder: Path) -> None:
    """Write the folders of all kinds, in float32."""
    qwen_images.write(folder / QWEN_IMAGE.model, WIDTH)
    painter = folder / OWN.model
    painter.mkdir()
    tokenizer = settings.DEMO_MODEL / TOKENIZER_FILE
    (painter / TOKENIZER_FILE).write_bytes(tokenizer.read_bytes())
    num_tokens = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    config = PainterConfig("pagemill_painter", 160, 4, 4, num_tokens, 24, 0, 2)
    (painter / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    torch.manual_seed(0)
    save_file(Painter(config.shape).state_dict(), painter / WEIGHTS_FILE)


def model_configs(folder: Path) -> dict[str, object]:
    """Return the configuration of a model for each kind, in this folder."""
    return {kind.model: _model_config(kind, folder / kind.model) for kind in KINDS}


def _model_config(kind: Kind, folder: Path) -> dict[str, object]:
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
                "sizes": [kind.params.size],
            },
        },
    }


@dataclass(slots=True)
class _Canvas:
    """An image that is being painted."""

    params: PaintParams
    prompt: Condition
    negative: Condition
    progress: Progress
    step: int = 0

    def next_step(self) -> Step:
        return Step(
            self.progress,
            self.prompt,
            self.negative,
            self.params.guidance,
            parse_size(self.params.size),
            self.step,
            self.params.steps,
        )


class PlainPainter:
    """Paints in this process, without a queue or a log."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        """`folder` has the folders of all kinds."""
        self._params, self._size = kind.params, parse_size(kind.params.size)
        self._model = load_image_model(folder / kind.model, "float32", [kind.params.size], STAGE)

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
                if canvas.step == self._params.steps:
                    to_png(self._model.pixels(canvas.progress.latents, self._size))
            open_ = [canvas for canvas in open_ if canvas.step < self._params.steps]
        return 60 * len(prompts) / (time.perf_counter() - began_s)

    def _begin(self, prompt: Prompt) -> _Canvas:
        noise = noise_of(prompt.seed, 0, self._model.noise_shape(self._size))
        condition, negative = self._model.encode([prompt.text, self._model.empty_negative or ""])
        progress = self._model.begin(self._size, noise)
        return _Canvas(self._params, condition, negative, progress)


def paint_by_pipeline(prompts: Sequence[Prompt]) -> float:
    """Paint images one after another by the pipeline of diffusers; return the images of a minute.

    The images are those of QWEN_IMAGE, except for their noise.
    """
    pipeline, params = qwen_images.build_pipeline(torch.float32, WIDTH), QWEN_IMAGE.params
    width, height = parse_size(params.size)
    began_s = time.perf_counter()
    for text, seed in prompts:
        painted = pipeline(
            prompt=text,
            negative_prompt=" ",
            height=height,
            width=width,
            num_inference_steps=params.steps,
            true_cfg_scale=params.guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        )
        to_png((painted.images[0] * 255).round().astype(np.uint8))
    return 60 * len(prompts) / (time.perf_counter() - began_s)


async def paint_by_queue(bus: Bus, kind: Kind, prompts: Sequence[Prompt], at_once: int) -> float:
    """Have workers paint all images; return the images of a minute."""
    began_s, waiting = time.perf_counter(), deque(prompts)
    steps, guidance = kind.params.steps, kind.params.guidance

    async def paint_some() -> None:
        while waiting:
            text, seed = waiting.popleft()
            image = ImageParams(kind.params.size, steps=steps, guidance=guidance, seed=seed)
            request = GenerateRequest(
                kind.model, prompt=text, outputs=[OUTPUT], image=image, timeout_s=120.0
            )
            log = client.ask(bus, request, client.new_request_id())
            last = [record async for record in log][-1]
            if not isinstance(last, Finish):
                raise SystemExit(f"an image has failed: {last}")

    await asyncio.gather(*(paint_some() for _ in range(at_once)))
    return 60 * len(prompts) / (time.perf_counter() - began_s)
