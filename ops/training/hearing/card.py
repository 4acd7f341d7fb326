"""The card of the model that hears: what it is, how well it hears, and its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open

from ops.training.hearing.evaluation import Score
from ops.training.hearing.samples import SHARES, TASKS, WORDINGS
from ops.training.hearing.sounds import MAX_BEEPS, MAX_S
from ops.training.hearing.speech import LOCALES, PICO_VOICES, VARIANTS
from ops.training.hearing.trainer import Settings, State

GOAL = 0.9
JUDGED = ("count", "level", "digit")
"""Kinds of questions that have a goal."""

CARD = """\
---
license: apache-2.0
pipeline_tag: audio-text-to-text
library_name: transformers
---

# Pagemill demo hearing

A model that hears, so that sounds can be tried, tested and shown without a download and without a
GPU: it counts up to {beeps} beeps, tells high from low, and knows spoken digits. It is of no other
use.

It is a thinker of Qwen2.5-Omni with {parameters:.2f} million parameters in float16: an audio tower
and a decoder of {layers} layers of {width} each. Its tokenizer is the
[demo model](../demo_model/README.md)'s, with the marks of sounds behind it. The class has eyes,
too; they are as small as can be, and nobody has trained them.

Sounds are 1 to {longest:g} seconds long in training; longer ones are heard, up to 30 seconds, and
the answers are of no worth. Decode greedily.

## Evaluation

Greedy answers by transformers in float32, to questions worded as in training. No program and no
formula of the training made the sounds: flite's voices `kal`, `awb`, `rms` and `slt`, cut
from recordings of people, speak every digit at three speeds, and the beeps are plucked strings,
bells and chords. Last come new sounds of the training's own kind.

| what was judged | right | share | goal |
| --- | --- | --- | --- |
{rows}

{verdict}

Other voices can be understood far worse: in a check beside these, the model of the third run knew
53 of 90 digits by festival's `ked`, and that of the second 61.

What was heard as something else:

{mistakes}

## Training

- Sounds: beeps of five waveforms and, since the second run, of random partials, which in the third
  also fade one by one, bend, and are struck; digits by espeak-ng in {voices} voices of {locales}
  locales and, in the third run, by the {pico} English voices of SVOX Pico; each with another
  speed, tempo, breath, echo, loudness of treble and bass, noise and silence around it.
- Tasks and their shares, in the third run: {tasks}; {wordings} wordings.
- {samples:,} sounds and {steps:,} steps of {batch} in {cpu:.0f} minutes of CPU time on one core
  ({minutes:.0f} minutes by the clock, beside other work), in bfloat16 and float32, with Muon
  and AdamW. A classifier beside the decoder, which is thrown away, helps the tower at the
  beginning.
- These are the sums of three runs, of which each goes on from the weights of the one before with
  half the rate (`--first`). `python -m ops.training.hearing train judge` makes a model anew.
"""


def write_card(folder: Path, scores: Mapping[str, Score], settings: Settings, state: State) -> None:
    shares = ", ".join(f"{task} {share:.0%}" for task, share in zip(TASKS, SHARES, strict=True))
    card = CARD.format(
        beeps=MAX_BEEPS,
        parameters=_num_parameters(folder) / 1e6,
        layers=settings.layers,
        width=settings.width,
        longest=MAX_S,
        rows="\n".join(_row(name, score) for name, score in scores.items()),
        verdict=_verdict(scores),
        mistakes="\n".join(_mistakes(scores)) or "- nothing",
        voices=len(VARIANTS),
        locales=len(LOCALES),
        pico=len(PICO_VOICES),
        tasks=shares,
        wordings=sum(map(len, WORDINGS.values())),
        samples=state.samples,
        steps=state.steps,
        batch=settings.batch,
        cpu=state.cpu_s / 60,
        minutes=state.elapsed_s / 60,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _num_parameters(folder: Path) -> int:
    total = 0
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (this is no mapping)
            size = 1
            for length in weights.get_slice(name).get_shape():
                size *= length
            total += size
    return total


def _row(name: str, score: Score) -> str:
    goal = f"{GOAL:.0%}" if name in JUDGED else "-"
    share = score.right / score.asked
    return f"| {name} | {score.right} of {score.asked} | {share:.1%} | {goal} |"


def _verdict(scores: Mapping[str, Score]) -> str:
    missed = [name for name in JUDGED if scores[name].right < GOAL * scores[name].asked]
    return "All goals are reached." if not missed else f"Missed: {', '.join(missed)}."


def _mistakes(scores: Mapping[str, Score]) -> Iterator[str]:
    for name in (*JUDGED, "description"):
        if mistakes := scores[name].mistakes.most_common(6):
            yield f"- {name}: " + ", ".join(f"{told} ({n})" for told, n in mistakes)
