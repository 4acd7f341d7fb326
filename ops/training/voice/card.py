"""The card of the voice: its parts, what was understood of it, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from ops.training.trainer import MuonState
from ops.training.voice.batches import WEIGHTS, WRONG_SHARE
from ops.training.voice.codec import NUM_CODES, SAMPLE_RATE
from ops.training.voice.corpus import FRAMES_COUNT, Corpus
from ops.training.voice.evaluation import Score
from ops.training.voice.features import FRAME_RATE, NUM_BANDS
from ops.training.voice.recording import ESPEAK_VOICE, WORDS_A_MINUTE
from ops.training.voice.talker import CODE_OFFSET, END, MOST_CODES, VOICE
from ops.training.voice.trainer import Settings

CARD = """\
---
license: apache-2.0
pipeline_tag: text-to-speech
library_name: transformers
---

# Pagemill demo voice

A voice for the [demo model](../demo_model/README.md): it speaks what that model can answer, {num}
texts, so that speech can be tried, tested and shown without a download and without a GPU. It is of
no other use: of other texts it makes sounds without meaning.

- `talker/`: a Qwen2 of {parameters:.2f} million parameters, {layers} layers of {width}, weights
  in float16. It turns a text into codes, {rate} for a second of speech.
- `code2wav.safetensors`: what each of the {codes} codes sounds like. It is a table for a vocoder of
  pulses and noise, not a network.
- `training/`: the programs that made both. The samples that they were made of are not kept.

## Talker

Its tokenizer is the demo model's, with the codes behind it: `<|code_0|>` is token {offset},
`<|code_{last_code}|>` is {last}; then come `{voice}` and `{end}`.
`config.json` has `code_offset` and `num_codes`. The prompt is the text, without special tokens,
then `{voice}`; the chat template makes it of the last message. The answer is codes, then
`{end}`. Decode greedily, with at most {most} codes; other ways of sampling were not
tried.

## Table

| array | type and shape | meaning |
| --- | --- | --- |
| `envelope` | float16, {codes} x {bands} | natural log of the gain in each band |
| `pitch` | float16, {codes} | Hz, 0 for unvoiced |
| `voicing` | float16, {codes} | the share of the power that is pulses; the rest is noise |
| `band_hz` | float32, {bands} | the middle of each band |

A code stands for the middle of its frame of {frame} samples, at {samples:,} samples a second.
Noise of variance 1, or pulses of the same power, filtered by the envelope has the power of the
speech; full scale is 1.

## Evaluation

Greedy codes by transformers in float32, samples by `workers/generator/table_vocoder.py`. A text
counts as understood where its own recording is the nearest of all recordings of its kind, by
time warping over cepstra that neither codec nor talker uses. The judge is a program: no person
has rated the voice. There are {short} short answers (single words and characters), {sentences}
sentences and {descriptions} descriptions, and at most {cases} of a kind were judged. The short
answers and the sentences are all trained on, and known by heart. {held_out} descriptions were
held out from codec and talker; they are new combinations of words that other descriptions have.

| what was judged | understood | share | goal |
| --- | --- | --- | --- |
{rows}

{verdict}

The first two rows are the ceiling: the codec and the vocoder without the talker. What was taken for
something else:

{mistakes}

## Training

- Recordings: espeak-ng {espeak}, voice `{espeak_voice}`, {speed} words a minute, of every answer
  in the data of `ops/training/seeing`; {minutes:.0f} minutes.
- Codec: k-means with {codes} centres over cepstra, pitch and voicing; frames of short answers
  count {often} times. The codes of an utterance are the cheapest path, with a cost for each
  change. Seed {seed}.
- Talker: {answers:,} answers, {tokens:,} tokens and {steps:,} steps in {cpu:.0f} minutes of CPU
  time on one core, in float32, with Muon and AdamW. {wrong:.0%} of the codes that it looks back
  on were replaced by random ones; the last mean loss was {loss:.2f}. A short answer was drawn
  {short_weight:.0f} times as often as a description, a sentence {sentence_weight:.0f} times. Seed
  {seed}.

`python -m ops.training.voice record codec train judge` makes it anew.
"""


def write_card(
    out: Path, scores: Sequence[Score], corpus: Corpus, settings: Settings, state: MuonState
) -> None:
    config: Any = Qwen2Config.from_pretrained(out / "talker")
    model = Qwen2ForCausalLM.from_pretrained(out / "talker")
    kinds = [answer.kind for answer in corpus.answers]
    missed = [score.name for score in scores if score.mark and score.percent < score.mark]
    verdict = f"Below the goal: {'; '.join(missed)}." if missed else "Both goals are reached."
    card = CARD.format(
        num=f"{len(kinds):,}",
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        rate=FRAME_RATE,
        codes=NUM_CODES,
        bands=NUM_BANDS,
        offset=CODE_OFFSET,
        last_code=NUM_CODES - 1,
        last=CODE_OFFSET + NUM_CODES - 1,
        voice=VOICE,
        end=END,
        most=MOST_CODES,
        frame=SAMPLE_RATE // FRAME_RATE,
        samples=SAMPLE_RATE,
        short=kinds.count("short"),
        sentences=kinds.count("sentence"),
        descriptions=f"{kinds.count('description'):,}",
        held_out=sum(answer.is_held_out for answer in corpus.answers),
        cases=max(score.asked for score in scores),
        rows="\n".join(row_of(score) for score in scores),
        verdict=verdict,
        mistakes="\n".join(line for score in scores if (line := mistakes_of(score))) or "- nothing",
        espeak=corpus.espeak,
        espeak_voice=ESPEAK_VOICE,
        speed=WORDS_A_MINUTE,
        minutes=sum(len(features.pitch) for features in corpus.features) / FRAME_RATE / 60,
        seed=settings.seed,
        answers=state.samples,
        tokens=state.tokens,
        steps=state.steps,
        cpu=state.cpu / 60,
        loss=state.loss,
        wrong=WRONG_SHARE,
        short_weight=WEIGHTS["short"],
        sentence_weight=WEIGHTS["sentence"],
        often=FRAMES_COUNT["short"],
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def row_of(score: Score) -> str:
    goal = f"{score.mark:.0f} %" if score.mark else "-"
    return f"| {score.name} | {score.right} of {score.asked} | {score.percent:.1f} % | {goal} |"


def mistakes_of(score: Score) -> str:
    told = [f"{text} ({taken_for or 'nothing'})" for text, taken_for in score.wrong]
    more = f", the first 8 of {len(told)}" if len(told) > 8 else ""
    lines = [f"- {score.name}{more}:", *(f"  - {one}" for one in told[:8])]
    return "\n".join(lines) if told else ""
