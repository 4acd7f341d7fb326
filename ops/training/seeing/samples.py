"""Training conversations: a scene, questions about it, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import Image

from ops.training.seeing.drawing import draw_character, draw_clip, draw_count, draw_scene
from ops.training.seeing.scenes import (
    CHARACTERS,
    MAX_COUNT,
    SHAPE_NAMES,
    Scene,
    Size,
    common_fit,
    training_size,
    two_colours,
)
from ops.training.seeing.styles import finished
from ops.training.seeing.tools import ToolText, add_tool, lookup_tool, offered, some_name, some_word
from ops.training.seeing.wordings import (
    ASKABLE,
    NO_PICTURE,
    PARAPHRASED_SHARE,
    WORDINGS,
    chosen,
    paraphrase,
)

FRAMED_SHARE = 0.5


def answer_to(task: str, scene: Scene) -> str | None:
    """The right answer, or None where the picture has none."""
    if task == "describe":
        return description(scene)
    value = {
        "plain colour": scene.colour,
        "shape colour": scene.colour,
        "background colour": scene.background,
        "shape": scene.shape,
        "count": scene.count,
        "character": scene.character,
        "where": scene.side,
        "motion": scene.motion,
        "change": scene.change,
        "last colour": scene.last_colour,
    }[task]
    return None if value is None else str(value)


def description(scene: Scene) -> str | None:
    if scene.kind == "plain":
        return f"a plain {scene.colour} picture"
    if scene.character is not None:
        sort = "digit" if scene.character.isdigit() else "letter"
        return f"the {sort} {scene.character} in {scene.colour}"
    if scene.colour is None or scene.shape is None:
        return None
    if scene.count == 1:
        return f"a {scene.colour} {scene.shape} on {scene.background}"
    plural = scene.shape + ("es" if scene.shape == "cross" else "s")
    return f"{scene.count} {scene.colour} {plural} on {scene.background}"


def worded(rng: random.Random, task: str, scene: Scene) -> str:
    """A question of the table, a clause of its task in a frame, or a paraphrase."""
    if rng.random() < PARAPHRASED_SHARE:
        pattern, words = paraphrase(rng, task), WORDINGS.paraphrase_words
    else:
        pattern, words = rng.choice(WORDINGS.questions[task]), WORDINGS.words
        if rng.random() < FRAMED_SHARE:
            pattern = rng.choice(WORDINGS.frames).format(rng.choice(WORDINGS.clauses[task]))
    if (scene.count or 0) > 1 and task in WORDINGS.plural_questions and rng.random() < 0.6:
        pattern = chosen(rng, rng.choice(WORDINGS.plural_questions[task]))
    things, signs = words["thing"], words["sign"]
    if scene.shape is not None and task != "shape" and rng.random() < 0.2:
        things = (scene.shape,)
    if scene.character is not None:
        sort = "digit" if scene.character.isdigit() else "letter"
        things = signs = (rng.choice(signs), sort, "number" if sort == "digit" else sort)
    if rng.random() < 0.08:
        pattern = f"{rng.choice(WORDINGS.openings)} {pattern}"
    if rng.random() < 0.04:
        pattern = f"{pattern} {rng.choice(WORDINGS.closings)}"
    sign = rng.choice(signs)
    return pattern.format(
        color=rng.choice(words["color"]),
        picture=rng.choice(words["clip" if scene.kind == "clip" else "picture"]),
        thing=sign if scene.character is not None else rng.choice(things),
        things=rng.choice(words["things"]),
        sign=sign,
    )


def dressed(rng: random.Random, question: str, suffixes: bool = True) -> str:
    """The same question as different people would type it."""
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    if rng.random() < 0.25:
        question = question[0].lower() + question[1:]
    else:
        question = question[0].upper() + question[1:]
    if suffixes and rng.random() < 0.35:
        question = f"{question} {rng.choice(WORDINGS.suffixes)}"
    if suffixes and rng.random() < 0.08:
        question = f"{rng.choice(WORDINGS.prefixes)} {question}"
    if rng.random() < 0.14:
        question = with_fillers(rng, question)
    return question.lower() if rng.random() < 0.06 else question


def with_fillers(rng: random.Random, question: str) -> str:
    """The question with words that do not matter, some of which mean nothing, at any places."""
    words = question.split(" ")
    for _ in range(rng.randint(1, 3)):
        word = rng.choice(WORDINGS.fillers) if rng.random() < 0.7 else some_word(rng)
        words.insert(rng.randint(0, len(words)), word)
    return " ".join(words)


@dataclass(slots=True)
class Turn:
    question: str
    answer: str
    role: Literal["user", "tool"] = "user"


@dataclass(slots=True)
class Sample:
    """A conversation; all pictures, or the clip, belong to its first question."""

    task: str
    pictures: list[Image.Image]
    turns: list[Turn]
    pictures_first: bool = True
    system: str | None = None
    clip: list[Image.Image] | None = None
    tools: list[ToolText] = field(default_factory=list)
    apart: bool = False
    """Whether the turns are separate conversations about the same pictures."""

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to its first answer, as the chat template takes it."""
        images = [{"type": "image"} for _ in self.pictures]
        images += [{"type": "video"}] if self.clip else []
        text = {"type": "text", "text": self.turns[0].question}
        content = [*images, text] if self.pictures_first else [text, *images]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]


def ask(rng: random.Random, task: str, scene: Scene) -> Turn | None:
    answer = answer_to(task, scene)
    if answer is None:
        return None
    return Turn(dressed(rng, worded(rng, task, scene)), answer)


def pair_sample(rng: random.Random, size: Callable[[str], Size]) -> Sample:
    """Two pictures, half of the time of the same colour."""
    kind = rng.choice(("plain", "plain", "shape"))
    first, scene = draw_scene(rng, kind, size(kind))
    same = rng.random() < 0.5
    while True:
        second, other = draw_scene(rng, kind, size(kind))
        if (other.colour == scene.colour) == same:
            break
    task = "same colour"
    turns = [
        Turn(dressed(rng, worded(rng, task, Scene("pair"))), "yes" if same else "no")
        for _ in range(2)
    ]
    return several(rng, Sample(task, [first, second], turns))


def several(rng: random.Random, sample: Sample) -> Sample:
    """Mostly independent questions; otherwise a conversation, or a picture after the text."""
    lot = rng.random()
    sample.apart = lot < 0.7
    if lot > 0.8:
        sample.pictures_first = False
        sample.turns = sample.turns[:1]
    return sample


def chat_sample(rng: random.Random) -> Sample:
    """A conversation without a picture."""
    if rng.random() < 0.35:
        task = rng.choice(tuple(WORDINGS.questions))
        scene = Scene("none", shape=rng.choice(SHAPE_NAMES))
        return Sample("no picture", [], [Turn(dressed(rng, worded(rng, task, scene)), NO_PICTURE)])
    kind = rng.choice(tuple(WORDINGS.chat))
    question = rng.choice(WORDINGS.chat[kind])
    if rng.random() < PARAPHRASED_SHARE:
        question = chosen(rng, rng.choice(WORDINGS.chat_paraphrases[kind]))
    elif kind in WORDINGS.chat_clauses and rng.random() < FRAMED_SHARE:
        question = rng.choice(WORDINGS.chat_frames).format(rng.choice(WORDINGS.chat_clauses[kind]))
    question = dressed(rng, question, suffixes=False)
    return Sample("about itself", [], [Turn(question, WORDINGS.chat_answers[kind])])


KIND_WEIGHTS = {"plain": 6, "shape": 22, "count": 32, "where": 12, "character": 28}
QUESTIONS = 3


def turns_about(rng: random.Random, scene: Scene) -> list[Turn]:
    """Questions about different things, the one that the scene was drawn for among them."""
    tasks = [task for task in ASKABLE[scene.kind] if answer_to(task, scene) is not None]
    main, *rest = tasks
    rng.shuffle(rest)
    chosen = [main, main if rng.random() < 0.25 else "", *rest]
    chosen = [task for task in chosen if task][:QUESTIONS]
    rng.shuffle(chosen)
    return [turn for task in chosen if (turn := ask(rng, task, scene))]


def picture_sample(rng: random.Random, final: Size) -> Sample:
    """One picture with several questions."""
    kind = rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))[0]
    picture, scene = draw_scene(rng, kind, training_size(rng, kind, final))
    sample = several(rng, Sample(kind, [picture], turns_about(rng, scene)))
    if rng.random() < 0.08:
        sample.tools = offered(rng)
    return sample


def clip_sample(rng: random.Random, final: Size) -> Sample:
    frames, scene = draw_clip(rng, final)
    return several(rng, Sample("clip", [], turns_about(rng, scene), clip=frames))


def tool_sample(rng: random.Random, final: Size) -> Sample:
    """A question that needs a call: the sum of two counts, or the name for a character."""
    if rng.random() < 0.5:
        tool = add_tool(rng)
        counts = [rng.randint(1, MAX_COUNT) for _ in range(2)]
        pictures = [
            finished(rng, draw_count(rng, final, two_colours(rng), count)[0]) for count in counts
        ]
        question = worded(rng, "add", Scene("count"))
        call, result = tool.call(*counts), str(sum(counts))
    else:
        tool = lookup_tool(rng)
        character = rng.choice(CHARACTERS)
        picture, scene = draw_character(rng, final, two_colours(rng), character)
        pictures = [finished(rng, picture)]
        question = worded(rng, "lookup", scene)
        call, result = tool.call(character), some_name(rng)
    turns = [Turn(dressed(rng, question), call), Turn(result, result, role="tool")]
    first = rng.random() < 0.8
    return Sample("tool", pictures, turns, first, tools=offered(rng, tool))


def training_samples(rng: random.Random, size: int) -> list[Sample]:
    """A batch in fixed proportions, with pictures mostly of one size, for speed."""
    final = common_fit(rng)
    pairs, chats, clips, tools = size * 2 // 32, size * 2 // 32, size * 7 // 32, size * 4 // 32

    def pair_size(kind: str) -> Size:
        return training_size(rng, kind, final if rng.random() < 0.8 else common_fit(rng))

    samples = [pair_sample(rng, pair_size) for _ in range(pairs)]
    samples += [chat_sample(rng) for _ in range(chats)]
    samples += [clip_sample(rng, final) for _ in range(clips)]
    samples += [tool_sample(rng, final) for _ in range(tools)]
    rest = size - len(samples)
    samples += [picture_sample(rng, final) for _ in range(rest)]
    for sample in samples:
        if sample.task in ("about itself", "no picture") and rng.random() < 0.15:
            sample.tools = offered(rng)
        if rng.random() < 0.12:
            sample.system = rng.choice(WORDINGS.system_prompts)
    return samples
