"""A painter without a network and without torch, whose images depend on every step."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from workers.generator.core.denoising import Latents, Pixels, Step, Stepped, noise_of


class FakePainter:
    """An ImageModel. Each image is computed alone, so that no batch makes a difference."""

    dtype: np.dtype[np.floating[Any]] = np.dtype(np.float64)

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def latents_shape(self, width: int, height: int) -> tuple[int, int, int]:
        return 3, height // 4, width // 4

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        time.sleep(self._step_s)
        return [self._stepped(step) for step in steps]

    def _stepped(self, step: Step) -> Stepped:
        digest = hashlib.blake2b(repr((step.tokens, step.negative)).encode(), digest_size=8)
        seed = int.from_bytes(digest.digest(), "little")
        target = np.tanh(noise_of(seed, 0, step.latents.shape, self.dtype))
        finished = np.cos(3 * step.latents + step.time) * 0.5 + target * step.guidance * 0.2
        moved = step.latents + (step.next_time - step.time) * (finished - step.latents)
        return Stepped(moved, finished)

    def pixels(self, latents: Latents) -> Pixels:
        values = np.clip(latents * 127.5 + 127.5, 0, 255).astype(np.uint8)
        return np.ascontiguousarray(values.transpose(1, 2, 0))
