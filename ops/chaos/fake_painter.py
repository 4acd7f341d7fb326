"""A painter without a network and without torch, whose images depend on every step."""

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from workers.generator.core.denoising import (
    Condition,
    Noise,
    Pixels,
    Progress,
    Size,
    Step,
    Stepped,
    noise_of,
)


class FakePainter:
    """An ImageModel. Each image is computed alone, so that no batch makes a difference."""

    empty_negative = ""
    min_guidance = 0.0
    no_guidance = 1.0

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    def check_text(self, text: str, field: str) -> int:
        return len(text.encode())

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        arrays = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return [Condition({"text": from_numpy(array)}, len(array)) for array in arrays]

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        width, height = size
        return 3, height // 4, width // 4

    def begin(self, size: Size, noise: Noise) -> Progress:
        return Progress(from_numpy(noise), {})

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        time.sleep(self._step_s)
        return [_stepped(step) for step in steps]

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        values = np.clip(to_numpy(latents) * 127.5 + 127.5, 0, 255).astype(np.uint8)
        return np.ascontiguousarray(values.transpose(1, 2, 0))


def _stepped(step: Step) -> Stepped:
    texts = [step.prompt] if step.negative is None else [step.prompt, step.negative]
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.num_tokens.to_bytes(8, "little"))
        digest.update(text.arrays["text"].data)
    latents = to_numpy(step.progress.latents)
    target = np.tanh(noise_of(int.from_bytes(digest.digest(), "little"), 0, latents.shape))
    finished = np.cos(3 * latents + step.number / step.steps) * 0.5 + target * step.guidance * 0.2
    moved = latents + (finished - latents) / step.steps
    return Stepped(Progress(from_numpy(moved), {}), from_numpy(finished))
