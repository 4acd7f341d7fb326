"""Further wordings of all questions, made from phrases with alternatives."""

from __future__ import annotations

import random
import re

from ops.training.seeing.wordings import WORDINGS

PARAPHRASED_SHARE = 0.6
_CHOICE = re.compile(r"\[([^][]*)\]")


def chosen(rng: random.Random, pattern: str) -> str:
    """Return the pattern with one of each of its alternatives: `[a|b|]` is a, b or nothing."""
    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), pattern)
    return re.sub(r" +(?=[ .?:]|$)", "", text)


def paraphrase(rng: random.Random, task: str) -> str:
    """Return a question of a task, with slots for words."""
    lot = rng.random()
    if lot < 0.4:
        return chosen(rng, rng.choice(WORDINGS.direct_questions[task]))
    frames, phrases = WORDINGS.clause_frames, WORDINGS.indirect_questions
    if lot < 0.7:
        frames, phrases = WORDINGS.noun_frames, WORDINGS.noun_phrases
    phrase = chosen(rng, rng.choice(phrases[task]))
    return chosen(rng, rng.choice(frames)).replace("{}", phrase)
