"""Further wordings of all questions, which tables of phrases with alternatives make.

`[a|b|]` stands for one of its alternatives, of which one may be nothing. Braces are the slots of
WORDS.
"""

from __future__ import annotations

import random
import re

from ops.training.seeing.clauses import INDIRECT_QUESTIONS, NOUN_PHRASES
from ops.training.seeing.direct_questions import DIRECT_QUESTIONS

WORDS: dict[str, tuple[str, ...]] = {
    "color": ("color", "colour", "color", "colour", "hue", "shade", "tint", "tone"),
    "picture": (
        "image", "picture", "photo", "drawing", "graphic", "illustration", "pic",
        "painting", "snapshot", "scene", "photograph", "artwork",
    ),
    "clip": (
        "video", "clip", "film", "animation", "movie", "recording", "sequence", "footage", "gif",
    ),
    "thing": (
        "shape", "object", "figure", "thing", "item", "form", "element",
        "geometric shape", "geometric figure", "outline",
    ),
    "things": (
        "shapes", "objects", "figures", "things", "items", "forms", "elements",
        "pieces", "geometric shapes", "marks",
    ),
    "sign": (
        "character", "letter or digit", "sign", "symbol", "glyph", "letter or number", "mark",
        "digit or letter", "alphanumeric character", "number or letter",
    ),
}  # fmt: skip

PARAPHRASED_SHARE = 0.6
NOUN_FRAMES = (
    "What is {}?", "What's {}?", "Which is {}?", "What would you say is {}?", "What might {} be?",
    "[Name|Identify|Give|Specify|State|Determine|Provide|Report|Indicate|Mention|Return|Output|"
    "Write|Say|Recognize|Find|Supply|Tell|Note|Reveal|Guess|Estimate] {}.",
    "[Please|Kindly|Just|Now] [name|identify|give|specify|state|determine|provide|report|indicate|"
    "mention|write|say|tell me|reply with|answer with|respond with|find] {}.",
    "[Can|Could|Would|Will] you [name|identify|give me|specify|state|determine|tell me|work out|"
    "figure out|recognize|make out|find|provide|describe] {}?",
    "I [need|want|am after|would like to have|am looking for|am asking for|care about] {}.",
    "[Do you recognize|Do you see|Are you able to tell|Have you got|Did you notice] {}?",
    "{}?", "{}:", "{}, what is it?", "Your task: {}.", "[Reply|Respond|Answer] with {}.",
)  # fmt: skip
CLAUSE_FRAMES = (
    "{}?", "[Tell me|Say|Determine|Find out|Figure out|Work out|Check|Decide|State|Indicate|"
    "Specify|Explain|Report|Guess|Judge|Note|Describe|Show me|Answer] {}.",
    "[Please|Kindly|Just|Now] [tell me|say|determine|find out|figure out|work out|check|decide|"
    "state|indicate|specify|explain|report|describe] {}.",
    "[Can|Could|Would|Will] you [tell|tell me|say|determine|find out|figure out|work out|check|"
    "decide|state|specify|explain|see] {}?",
    "I [would like to know|want to find out|need to know|am asking|wonder|would love to know|"
    "can't tell|am not sure|don't see|forgot|have to know|am curious] {}.",
    "[Do you see|Any idea|Are you able to say|Is it clear|Did you notice|Have you seen] {}?",
    "Help me [find out|see|understand|determine] {}.", "The question is {}.", "Looking at it, {}?",
    "[In your opinion|As far as you can see|At a glance|Judging by the {picture}], {}?",
)  # fmt: skip
_CHOICE = re.compile(r"\[([^][]*)\]")


def chosen(rng: random.Random, pattern: str) -> str:
    """The pattern with one of each of its alternatives."""
    text = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), pattern)
    return re.sub(r" +(?=[ .?:]|$)", "", text)


def paraphrase(rng: random.Random, task: str) -> str:
    """A question of a task, with the slots of WORDS."""
    lot = rng.random()
    if lot < 0.4:
        return chosen(rng, rng.choice(DIRECT_QUESTIONS[task]))
    framed = (NOUN_FRAMES, NOUN_PHRASES) if lot < 0.7 else (CLAUSE_FRAMES, INDIRECT_QUESTIONS)
    frames, phrases = framed
    phrase = chosen(rng, rng.choice(phrases[task]))
    return chosen(rng, rng.choice(frames)).replace("{}", phrase)
