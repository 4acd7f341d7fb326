"""Judge of the painter: the demo model looks at its images."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ops.training.card import Score, verdict, write_card
from ops.training.folders import SEEING
from ops.training.painter import prompts as words
from ops.training.painter import task as painting
from ops.training.painter.prompts import Prompt, all_prompts, draw
from ops.training.painter.task import SCALE, SHAPE, SIZE
from ops.training.seeing.evaluation import Folder
from ops.training.seeing.scenes import Size
from ops.training.trainer import State, console
from shared.codec.arrays import from_numpy
from shared.codec.envelope import TensorData
from shared.protocol.images import MAX_STEPS
from workers.generator.core.denoising import ImageModel, Step, noise_of
from workers.generator.painter_model import load_painter

CARD = Path(__file__).with_name("card.md")
QUESTION = "What do you see?"
GOAL = 90.0
ROWS_TOGETHER = 20


def judged_prompts(number: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, half of them for one shape."""
    rng = random.Random(f"{seed}/judged")
    held_out = [prompt for prompt in all_prompts() if prompt.is_held_out]
    single = [prompt for prompt in held_out if prompt.count == 1]
    several = [prompt for prompt in held_out if prompt.count > 1]
    # Prompts for one shape repeat, with other seeds: there are too few of them.
    return rng.choices(single, k=number // 2) + rng.sample(several, number - number // 2)


def paint(
    model: ImageModel, prompts: Sequence[str], size: Size, steps: int, guidance: float
) -> list[Image.Image]:
    """Return an image of each prompt, with its index in the list as seed."""
    assert 1 <= steps <= MAX_STEPS
    shape = model.noise_shape(size)
    conditions = model.encode(prompts)
    (negative,) = model.encode([model.empty_negative or ""]) if guidance != 1.0 else (None,)
    images: list[Image.Image] = []
    for first in range(0, len(prompts), ROWS_TOGETHER):
        group = range(first, min(len(prompts), first + ROWS_TOGETHER))
        rows = [model.begin(size, noise_of(seed, 0, shape)) for seed in group]
        for step in range(steps):
            batch = [
                Step(row, conditions[seed], negative, guidance, size, step, steps)
                for seed, row in zip(group, rows, strict=True)
            ]
            rows = [stepped.progress for stepped in model.step(batch)]
        images += [Image.fromarray(model.pixels(row.latents, size)) for row in rows]
    return images


def judge(
    score: Score, judge_model: Folder, prompts: Sequence[Prompt], images: Sequence[Image.Image]
) -> Score:
    """Ask the demo model what the images show. Only the exact prompt is right."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    for prompt, image in zip(prompts, images, strict=True):
        answer = judge_model.answer([{"role": "user", "content": content}], [image])
        score.add(prompt.text, answer)
    console.log(str(score))
    return score


def evaluate(
    out: Path, size: Size, cases: int, steps: int, guidance: float, seed: int
) -> tuple[Score, Score]:
    """Return the scores of painted images and of drawings, which are the ceiling."""
    prompts = judged_prompts(cases, seed)
    model = load_painter(out, "float32", [f"{size[0]}x{size[1]}"], "the painter")
    painted = paint(model, [prompt.text for prompt in prompts], size, steps, guidance)
    rng = random.Random(f"{seed}/drawn")
    _, height, width = model.noise_shape(size)
    drawn = [
        Image.fromarray(model.pixels(_latents(draw(rng, prompt, (width, height))), size))
        for prompt in prompts
    ]
    judge_model = Folder(SEEING)
    return (
        judge(Score("painted", GOAL), judge_model, prompts, painted),
        judge(Score("drawn"), judge_model, prompts, drawn),
    )


def _latents(image: Image.Image) -> TensorData:
    return from_numpy(np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1)


def write_painter_card(
    out: Path,
    scores: tuple[Score, Score],
    sampling: tuple[int, float],
    state: State,
    batch: int,
    seed: int,
) -> None:
    painted, drawn = scores
    steps, guidance = sampling
    prompts = judged_prompts(painted.num_questions, seed)
    write_card(
        out,
        CARD,
        parameters=sum(p.numel() for p in painting.build_network().parameters()) / 1e6,
        shape=SHAPE,
        scale=SCALE,
        sizes=", ".join(map(_size, (SIZE, *painting.OTHER_SIZES))),
        multiple=SHAPE.patch * SCALE,
        steps=steps,
        guidance=guidance,
        size=_size(SIZE),
        last=painted.num_questions - 1,
        question=QUESTION,
        painted=painted,
        painted_by=_by_count(painted, prompts),
        drawn=drawn,
        drawn_by=_by_count(drawn, prompts),
        verdict=verdict([painted]),
        mistakes="\n".join(f"- {text} ({answer})" for text, answer in painted.mistakes[:8])
        or "- nothing",
        state=state,
        batch=batch,
        cpu=state.cpu_s / 60,
        num_prompts=len(all_prompts()),
        held_out=words.HELD_OUT_EVERY,
        other_words=words.OTHER_WORDS_SHARE,
        dropped=painting.DROPPED_SHARE,
        other_sizes=painting.OTHER_SIZES_SHARE,
        most_time=1 - painting.LEAST_NOISE,
        single_part=painting.SINGLE_PART,
        single_share=painting.SINGLE_SHARE,
        stray=words.STRAY,
        least=words.PARTS[0],
        most=words.PARTS[1],
        tilt=words.TILT,
        seed=seed,
    )


def _size(size: Size) -> str:
    return f"{size[0] * SCALE}x{size[1] * SCALE}"


def _by_count(score: Score, prompts: Sequence[Prompt]) -> str:
    """Return right answers and questions for each number of shapes."""
    questions = Counter(prompt.count for prompt in prompts)
    counts = {prompt.text: prompt.count for prompt in prompts}
    wrong = Counter(counts[text] for text, _ in score.mistakes)
    return ", ".join(f"{questions[n] - wrong[n]}/{questions[n]}" for n in sorted(questions))
