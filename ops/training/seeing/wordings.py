"""Wordings of the training conversations, from `wordings.yaml`, and paraphrases made from them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec

Phrases = tuple[str, ...]
Table = dict[str, Phrases]
"""Phrases by task, by word, or by the kind of an answer without an image."""

NO_PICTURE = "I see no picture."
# Questions for each kind of picture. The first is the one that the picture was drawn for.
# Descriptions stand twice where their answers have many forms.
ASKABLE: Table = {
    "plain": ("plain colour", "describe"),
    "shape": ("shape", "shape colour", "background colour", "count", "describe", "describe"),
    "count": ("count", "shape colour", "background colour", "describe", "describe"),
    "where": ("where", "shape", "shape colour", "background colour", "count", "describe"),
    "character": ("character", "shape colour", "background colour", "describe", "describe"),
    "clip": ("motion", "change", "last colour", "shape", "shape colour", "background colour"),
}


class Wordings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: Table
    paraphrase_words: Table
    questions: Table
    clauses: Table
    frames: Phrases
    direct_questions: Table
    plural_questions: Table
    noun_phrases: Table
    noun_frames: Phrases
    indirect_questions: Table
    clause_frames: Phrases
    chat_answers: dict[str, str]
    chat: Table
    chat_clauses: Table
    chat_frames: Phrases
    chat_paraphrases: Table
    openings: Phrases
    closings: Phrases
    prefixes: Phrases
    suffixes: Phrases
    fillers: Phrases
    system_prompts: Phrases


_FILE = Path(__file__).with_name("wordings.yaml")
WORDINGS = msgspec.yaml.decode(_FILE.read_bytes(), type=Wordings)

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
