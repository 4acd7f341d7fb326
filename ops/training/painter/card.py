"""The card of the painter: what it paints, how well, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.training.painter.evaluation import MARK, QUESTION, Score
from ops.training.painter.prompts import (
    HELD_OUT_EVERY,
    OTHER_WORDS_SHARE,
    PARTS,
    STRAY,
    TILT,
    all_prompts,
)
from ops.training.painter.saving import SCALE
from ops.training.painter.trainer import (
    DROPPED_SHARE,
    LEAST_NOISE,
    OTHER_SIZES,
    OTHER_SIZES_SHARE,
    SHAPE,
    SINGLE_PART,
    SINGLE_SHARE,
    SIZE,
    Settings,
    build_network,
)
from ops.training.seeing.scenes import Size
from ops.training.trainer import MuonState

CARD = """\
---
license: apache-2.0
pipeline_tag: text-to-image
---

# Pagemill demo painter

A diffusion transformer of {parameters:.2f} million parameters that paints what the [demo
model](../demo_model/README.md) can see: one to five shapes of a colour on a background, such as
"a red circle on blue" or "3 green stars on white", so that images can be tried, tested and shown
without a download and without a GPU. It is of no other use: of other prompts it paints patches of
colour.

`pagemill up --config ops/demo_painter/pagemill.yaml` serves it, and `pagemill draw "a red circle
on blue" -o out.png` asks it.

## Network

{depth} layers of {width} over {text} tokens of the prompt and one token for each patch of {patch}
x {patch} pixels; the time modulates all layers through one shared layer and a table of each
layer's own. It predicts the finished image. Latents are pixels from -1 to 1; the image is {scale}
times as large, by bicubic interpolation. Sizes are {sizes}, multiples of {multiple} in each
direction. Weights are in float16, the tokenizer is the demo model's.

## Evaluation

{cases} prompts that were never trained on, half of them for one shape, the others for two to
five; {steps} steps, guidance {guidance:g}, {size} pixels, seeds 0 to {last}. An image counts if
the demo model, asked "{question}", answers with the prompt, word for word: count, colour, shape
and background. The judge is a program, and not always right: the second row has drawings of the
same prompts in its place.

| what was judged | exact | share | goal | by count, 1 to 5 |
| --- | --- | --- | --- | --- |
| painted | {painted} | {mark:.0f} % | {painted_by} |
| drawn by the program that made the training's images | {drawn} | - | {drawn_by} |

{verdict} What the judge took painted images for, the first 8:

{mistakes}

## Training

{images:,} drawings in {num_steps:,} steps of {batch}, {cpu:.0f} minutes of CPU time on one core
that others shared, in which pauses do not count. Matrices are multiplied in bfloat16, the rest is
in float32; Muon and AdamW, and the weights are a moving average. The loss is that of the
velocity, with times above {most_time:g} counted as that one; the last mean was {loss:.3f}.
{num_prompts:,} prompts: one in {held_out} was held out. The first {single_part:.0%} of the time
had prompts for one shape alone, and the rest {single_share:.0%} of them. {other_words:.0%} were
in other words ("three red circles on a blue background"), and {dropped:.0%} were left out, for
guidance. {other_sizes:.0%} of the batches had another size than {size}, the others that size
alone. Seed {seed}.

The drawings are easy to learn on purpose. Each count has one layout, and a shape strays at most
{stray:.1%} of the shorter side from its place, with {least:.0%} to {most:.0%} of its radius and a
tilt of at most {tilt:g} degrees; so images of one prompt differ little. Colours are plain ones.
The layouts were tuned to the judge: of 20 to 60 random ones of each count, one at which it read
drawings best was taken. The judge was trained before, on drawings at random places, and is
unchanged. The guidance was chosen by images of prompts that were trained on. The prompts of the
evaluation had no part in either.

`python -m ops.training.painter train judge` makes it anew. The learning rate follows the CPU
time, so a run is seeded but not reproducible to the bit.
"""


def write_card(
    out: Path,
    painted: Score,
    drawn: Score,
    sampling: tuple[int, float],
    settings: Settings,
    state: MuonState,
) -> None:
    steps, guidance = sampling
    parameters = sum(parameter.numel() for parameter in build_network().parameters())
    verdict = "The goal is reached." if painted.percent >= MARK else "The goal is missed."
    card = CARD.format(
        parameters=parameters / 1e6,
        depth=SHAPE.depth,
        width=SHAPE.width,
        text=SHAPE.max_text,
        patch=SHAPE.patch,
        scale=SCALE,
        sizes=", ".join(map(_size, (SIZE, *OTHER_SIZES))),
        multiple=SHAPE.patch * SCALE,
        cases=painted.asked,
        steps=steps,
        guidance=guidance,
        size=_size(SIZE),
        last=painted.asked - 1,
        question=QUESTION,
        painted=_share(painted),
        painted_by=_by_count(painted),
        drawn=_share(drawn),
        drawn_by=_by_count(drawn),
        mark=MARK,
        verdict=verdict,
        mistakes="\n".join(f"- {text} ({seen})" for text, seen in painted.wrong[:8]) or "- nothing",
        images=state.samples,
        num_steps=state.steps,
        batch=settings.batch,
        cpu=state.cpu / 60,
        loss=state.loss,
        num_prompts=len(all_prompts()),
        held_out=HELD_OUT_EVERY,
        other_words=OTHER_WORDS_SHARE,
        dropped=DROPPED_SHARE,
        other_sizes=OTHER_SIZES_SHARE,
        most_time=1 - LEAST_NOISE,
        single_part=SINGLE_PART,
        single_share=SINGLE_SHARE,
        stray=STRAY,
        least=PARTS[0],
        most=PARTS[1],
        tilt=TILT,
        seed=settings.seed,
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def _size(size: Size) -> str:
    return f"{size[0] * SCALE}x{size[1] * SCALE}"


def _share(score: Score) -> str:
    return f"{score.right} of {score.asked} | {score.percent:.1f} %"


def _by_count(score: Score) -> str:
    groups: Sequence[list[bool]] = [score.by_count[count] for count in sorted(score.by_count)]
    return ", ".join(f"{sum(group)}/{len(group)}" for group in groups)
