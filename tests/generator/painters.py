"""A painter with random weights, and a plain loop over it in place of a worker."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from ops.plain_painting import paint_alone
from shared.protocol.images import PaintParams
from workers.generator.core.denoising import Condition, ImageModel, Step, Stepped
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
        self.reading_threads: set[threading.Thread] = set()
        self.encoded: list[str] = []

    def check_text(self, text: str, field: str) -> int:
        self.reading_threads.add(threading.current_thread())
        return super().check_text(text, field)

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        self.reading_threads.add(threading.current_thread())
        self.encoded += texts
        return super().encode(texts)

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        self.batches.append([step.number / step.steps for step in steps])
        self.began.release()
        assert self.may_go_on.acquire(timeout=20)
        return super().step(steps)


def painted_alone(
    prompt: str, params: PaintParams, number: int = 0, model: ImageModel | None = None
) -> bytes:
    """The PNG file of an image, painted by itself."""
    return paint_alone(model or WatchedPainter(), prompt, params, number)
