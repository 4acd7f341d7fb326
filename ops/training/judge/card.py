"""The card of the demo model: its size, its marks and its training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

# For each row, right answers and questions, by column: seen or unseen wordings.
Marks = dict[str, dict[str, list[int]]]


@dataclass(frozen=True, slots=True)
class RowOfCard:
    name: str
    wanted: int = 90
    wanted_unseen: int = 80


ROWS = {
    "plain": RowOfCard("colour of a plain picture", 95),
    "colour": RowOfCard("colour of a shape", 95),
    "background": RowOfCard("colour of the background"),
    "shape": RowOfCard("kind of shape (6)", 95),
    "describe": RowOfCard("short description"),
    "count": RowOfCard("how many shapes (1 to 5)"),
    "character": RowOfCard("digit or letter (36)"),
    "where": RowOfCard("where a shape is (4 sides)"),
    "same": RowOfCard("two pictures of the same colour?"),
    "chat": RowOfCard("questions without a picture"),
    "nothing": RowOfCard("picture question without a picture"),
    "motion": RowOfCard("which way a shape moves in a clip (4 ways)", 95),
    "change": RowOfCard("grows or shrinks in a clip", 95),
    "last": RowOfCard("colour at the end of a clip", 95),
    "add": RowOfCard("sum of two counts, by a tool"),
    "lookup": RowOfCard("name behind a character, by a tool"),
    "no call": RowOfCard("tools are offered, and not needed"),
}

CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# Pagemill demo model

A Qwen2-VL of {parameters:.1f} million parameters, trained on questions about simple pictures:
plain colours, shapes, small counts, single digits and letters, the side on which a shape is, and
whether two pictures have the same colour; on clips of a shape that moves, changes its size or its
colour; and on calls of a tool where a question needs one. How well it does each is measured below.
It exists so that Pagemill can be tried, tested and shown anywhere, without a download and without a
GPU. It is of no other use: on a photograph its answers mean nothing.

- Vision tower {tower_layers} layers of {tower_width}, text model {text_layers} layers of
  {text_width}, {vocabulary} tokens, a context of {context} tokens, weights in float16.
- A picture of any size is resized to at most 103 x 103 pixels' worth of area, which makes about 8
  to 12 image tokens; a clip makes as many for every two of its frames.
- Tools are listed in the system's turn, and calls are written as Qwen writes them
  (`<tool_call>`). The text behind a clip goes on behind the clip's largest position.
- Trained by `ops/training/seeing` on pictures that the program draws itself, in many styles, fonts
  and file formats.

## Evaluation

Judged by `ops/training/judge`, which shares no code with the training: other ways of drawing, other
fonts and tones, 40 to 400 pixels, PNG, JPEG and WebP, clips as GIF of 8 to 24 frames; 444 images in
the first rows. Each question is asked in a wording that training has too, and in one that it never
has. Greedy decoding in float32 through transformers; only the exact answer counts. In brackets,
where it was measured, the model before this one.

| task | seen wordings | unseen wordings | asked | wanted |
| --- | --- | --- | --- | --- |
{rows}

{verdict}
"""


def percent(score: list[int]) -> float:
    return 100 * score[0] / score[1]


def write_card(folder: Path, marks: Marks, before: Marks) -> None:
    config: Any = Qwen2VLConfig.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    lines, short = [], []
    for name, row in ROWS.items():
        columns = marks[name]
        cells = [row.name]
        for column in ("seen", "unseen"):
            then = f" ({percent(before[name][column]):.0f})" if name in before else ""
            cells.append(f"{percent(columns[column]):.1f} %{then}")
        cells += [str(columns["seen"][1]), f"{row.wanted} / {row.wanted_unseen} %"]
        lines.append(f"| {' | '.join(cells)} |")
        if percent(columns["seen"]) < row.wanted or percent(columns["unseen"]) < row.wanted_unseen:
            short.append(row.name)
    verdict = f"Below what is wanted: {'; '.join(short)}." if short else "Every row is reached."
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        tower_layers=config.vision_config.depth,
        tower_width=config.vision_config.embed_dim,
        text_layers=config.text_config.num_hidden_layers,
        text_width=config.text_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
        context=config.text_config.max_position_embeddings,
        rows="\n".join(lines),
        verdict=verdict,
    )
    notes = folder / "training.json"
    if notes.exists():
        note = json.loads(notes.read_text())
        card += f"\n## Training\n\nOn a {note['machine']}, {note['start']}:\n\n"
        card += "".join(f"- {phase}\n" for phase in note["phases"])
    (folder / "README.md").write_text(card, encoding="utf-8")
