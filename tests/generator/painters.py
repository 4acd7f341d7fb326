"""A painter with random weights, and a plain loop over it in place of a worker."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from shared.protocol.images import PaintParams, parse_size
from workers.generator.core.denoising import ImageModel, Step, Stepped, noise_of, time_of
from workers.generator.image_worker import to_png
from workers.generator.painter import Painter
from workers.generator.painter_model import PainterConfig, PainterModel

CONFIG = PainterConfig("pagemill_painter", 32, 2, 2, 768, 12, 754, 2)
TOKENIZER = Path(__file__).parents[2] / "ops" / "demo_model" / "tokenizer.json"


def network() -> Painter:
    torch.manual_seed(7)
    return Painter(CONFIG.shape)


def write(folder: Path) -> None:
    """Write the files of the painter, with the demo model's tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    save_file(network().state_dict(), folder / "model.safetensors")
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")


class WatchedPainter(PainterModel):
    """A painter that notes the times of its batches, and may be made to wait before each."""

    def __init__(self, *, gated: bool = False) -> None:
        super().__init__(CONFIG, network(), lambda text: [*text.encode()], torch.float64)
        self.batches: list[list[float]] = []
        """The times of the images of each batch."""
        self.began = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0 if gated else 10**6)
        self.encoding_threads: set[threading.Thread] = set()

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        self.encoding_threads.add(threading.current_thread())
        return super().encode(text, field)

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        self.batches.append([step.time for step in steps])
        self.began.release()
        assert self.may_go_on.acquire(timeout=20)
        return super().step(steps)


def painted_alone(
    prompt: str, params: PaintParams, number: int = 0, model: ImageModel | None = None
) -> bytes:
    """The PNG file of an image, painted by itself."""
    model = model or WatchedPainter()
    assert params.seed is not None
    shape = model.latents_shape(*parse_size(params.size))
    latents = noise_of(params.seed, number, shape, np.dtype(np.float64))
    texts = model.encode(prompt, ""), model.encode(params.negative_prompt, "")
    for step in range(params.steps):
        times = time_of(step, params.steps), time_of(step + 1, params.steps)
        (done,) = model.step([Step(latents, *texts, params.guidance, *times)])
        latents = done.latents
    return to_png(model.pixels(latents))
