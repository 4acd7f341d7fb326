"""How many images show what their prompts say: the demo model looks at them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from ops.training.painter.prompts import Prompt, all_prompts, draw
from ops.training.seeing.evaluation import Folder
from ops.training.seeing.scenes import Size, console
from shared.protocol.images import MAX_STEPS
from workers.generator.core.denoising import ImageModel, Step, noise_of, time_of
from workers.generator.painter_model import load_painter

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"
QUESTION = "What do you see?"
MARK = 90.0
ROWS_TOGETHER = 20


@dataclass(slots=True)
class Score:
    """Images whose description by the demo model is their prompt, word for word."""

    asked: int = 0
    right: int = 0
    by_count: dict[int, list[bool]] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * self.right / max(1, self.asked)

    def add(self, prompt: Prompt, seen: str) -> None:
        is_right = seen == prompt.text
        self.asked += 1
        self.right += is_right
        self.by_count.setdefault(prompt.count, []).append(is_right)
        if not is_right:
            self.wrong.append((prompt.text, seen))


def judged_prompts(number: int, seed: int) -> list[Prompt]:
    """Prompts that were never trained on, half of them for one shape."""
    rng = random.Random(f"{seed}/judged")
    held_out = [prompt for prompt in all_prompts() if prompt.is_held_out]
    single = [prompt for prompt in held_out if prompt.count == 1]
    several = [prompt for prompt in held_out if prompt.count > 1]
    # There are fewer for one shape than are asked; their seeds differ.
    return rng.choices(single, k=number // 2) + rng.sample(several, number - number // 2)


def paint(
    model: ImageModel, prompts: Sequence[str], size: Size, steps: int, guidance: float
) -> list[Image.Image]:
    """An image of each prompt, the seed of which is its place in the list."""
    assert 1 <= steps <= MAX_STEPS
    shape = model.latents_shape(*size)
    texts = [model.encode(prompt, "prompt") for prompt in prompts]
    images: list[Image.Image] = []
    for first in range(0, len(texts), ROWS_TOGETHER):
        group = range(first, min(len(texts), first + ROWS_TOGETHER))
        latents = [noise_of(seed, 0, shape, model.dtype) for seed in group]
        for step in range(steps):
            times = time_of(step, steps), time_of(step + 1, steps)
            rows = [
                Step(row, texts[seed], (), guidance, *times)
                for seed, row in zip(group, latents, strict=True)
            ]
            latents = [done.latents for done in model.step(rows)]
        images += [Image.fromarray(model.pixels(row)) for row in latents]
    return images


def judge(judge_model: Folder, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> Score:
    score = Score()
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    for prompt, image in zip(prompts, images, strict=True):
        score.add(prompt, judge_model.answer([{"role": "user", "content": content}], [image]))
    return score


def evaluate(
    out: Path, size: Size, cases: int, steps: int, guidance: float, seed: int
) -> tuple[Score, Score]:
    """The scores of painted images and of drawings, which are the ceiling."""
    prompts = judged_prompts(cases, seed)
    model = load_painter(out, "float32", [f"{size[0]}x{size[1]}"], "the painter")
    painted = paint(model, [prompt.text for prompt in prompts], size, steps, guidance)
    rng = random.Random(f"{seed}/drawn")
    _, height, width = model.latents_shape(*size)
    drawn = [
        Image.fromarray(model.pixels(_latents(draw(rng, prompt, (width, height)))))
        for prompt in prompts
    ]
    judge_model = Folder(DEMO_MODEL)
    scores = judge(judge_model, prompts, painted), judge(judge_model, prompts, drawn)
    for name, score in zip(("painted", "drawn"), scores, strict=True):
        console.log(f"{name}: {score.right} of {score.asked}; wrong: {score.wrong[:8]}")
    return scores


def _latents(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1
