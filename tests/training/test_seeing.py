"""The demo model's training and its judge: their drawings and questions, and their independence."""

import ast
import io
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration

from ops.training.judge.answering import definition, parse_call, sampled_frames
from ops.training.judge.cases import MAKERS, questions_of
from ops.training.judge.drawing import FONT_ROOT, FONTS
from ops.training.judge.questions import QUESTIONS
from ops.training.seeing.batches import chat_batch, encoded
from ops.training.seeing.drawing import draw_clip, draw_scene
from ops.training.seeing.evaluation import check
from ops.training.seeing.mixing import WEIGHTS, mixed
from ops.training.seeing.model import chat_loss
from ops.training.seeing.samples import clip_sample, tool_sample, training_samples
from ops.training.seeing.scenes import SHAPE_NAMES
from ops.training.seeing.tokenizer import Encoder, load_tokenizer
from ops.training.seeing.tools import add_tool
from ops.training.seeing.wordings import WORDINGS, paraphrase
from shared.models.mrope import GridRun, locate_grids

OPS = Path(__file__).parents[2] / "ops"
MODEL = OPS / "demo_model"
WORDS, FRAMES = WORDINGS.paraphrase_words, WORDINGS.frames
FRAMED_PHRASES = (
    (WORDINGS.noun_frames, WORDINGS.noun_phrases),
    (WORDINGS.clause_frames, WORDINGS.indirect_questions),
)
FILLINGS = {
    "color": ("color", "colour"),
    "picture": ("image", "picture", "photo", "drawing", "video", "clip", "film", "animation"),
    "thing": ("shape", "object", "figure", "thing", *SHAPE_NAMES),
    "things": ("shapes", "objects", "figures", "things"),
    "sign": ("character", "letter or digit", "sign", "symbol", "letter", "digit", "number"),
}


def plain(question: str) -> str:
    return question.lower().rstrip("?.!")


def questions_of_training() -> Iterator[str]:
    for task, wordings in WORDINGS.questions.items():
        framed = (frame.format(clause) for frame in FRAMES for clause in WORDINGS.clauses[task])
        for pattern in itertools.chain(wordings, framed):
            names = [name for name in FILLINGS if f"{{{name}}}" in pattern]
            for values in itertools.product(*(FILLINGS[name] for name in names)):
                yield plain(pattern.format(**dict(zip(names, values, strict=True))))
    yield from (plain(question) for questions in WORDINGS.chat.values() for question in questions)
    for clauses in WORDINGS.chat_clauses.values():
        for frame, clause in itertools.product(WORDINGS.chat_frames, clauses):
            yield plain(frame.format(clause))


def expression_of(pattern: str) -> str:
    """A regular expression of all that the alternatives of a pattern make, without spaces."""
    text = re.sub("[?.:]", "[?.:]?", pattern.replace(" ", ""))
    return re.sub(r"\[([^][]*\|[^][]*)\]", r"(?:\1)", text)


def expressions_of_paraphrases() -> Iterator[re.Pattern[str]]:
    slots = {
        name: f"(?:{'|'.join({*words, *FILLINGS.get(name, ())})})" for name, words in WORDS.items()
    }
    slots["picture"] = f"(?:{slots['picture']}|{slots['clip']})"
    slots["thing"] = f"(?:{slots['thing']}|{slots['sign']})"
    tables = (*WORDINGS.chat_paraphrases.values(), *WORDINGS.plural_questions.values())
    patterns = [expression_of(text) for texts in tables for text in texts]
    for task, texts in WORDINGS.direct_questions.items():
        patterns += map(expression_of, texts)
        for frames, phrases in FRAMED_PHRASES:
            inner = f"(?:{'|'.join(map(expression_of, phrases[task]))})"
            patterns += [expression_of(frame).replace("{}", inner) for frame in frames]
    for pattern in patterns:
        for name, words in slots.items():
            pattern = pattern.replace(f"{{{name}}}", words.replace(" ", ""))
        yield re.compile(pattern, re.IGNORECASE)


def test_the_judge_imports_nothing_of_the_training() -> None:
    """It has its own drawings and wordings. The imports that are left draw and word nothing."""
    allowed = {"ops.training.card", "ops.training.audio"}
    for file in (OPS / "training" / "judge").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                modules = [node.module or ""]
            for module in modules:
                if module.split(".")[0] in ("ops", "shared", "workers"):
                    assert module in allowed or module.startswith("ops.training.judge."), file


def test_training_has_the_seen_questions_and_no_unseen_ones() -> None:
    trained = set(questions_of_training())
    for questions in QUESTIONS.seen_wordings.values():
        assert {plain(question) for question in questions} <= trained
    for questions in QUESTIONS.unseen_wordings.values():
        assert not {plain(question) for question in questions} & trained
    unseen = [
        plain(question)
        for questions in QUESTIONS.unseen_wordings.values()
        for question in questions
    ]
    for expression in expressions_of_paraphrases():
        assert not any(expression.fullmatch(text.replace(" ", "")) for text in unseen)


def test_paraphrases_are_what_their_expressions_say() -> None:
    rng, expressions = random.Random(4), list(expressions_of_paraphrases())
    for task in WORDINGS.direct_questions:
        for _ in range(8):
            text = paraphrase(rng, task).format(**{name: words[0] for name, words in WORDS.items()})
            text = plain(text).replace(" ", "")
            assert any(expression.fullmatch(text) for expression in expressions), text


@pytest.mark.skipif(
    not all((FONT_ROOT / name).exists() for name in FONTS),
    reason="needs Debian's package fonts-liberation",
)
def test_the_judge_draws_files_in_three_formats_and_of_the_sizes_that_it_names() -> None:
    formats, num_questions = set(), 0
    for kind in MAKERS:
        for question in questions_of(kind, seed=1, share=0.04):
            num_questions += 1
            for file in question.case.files:
                image = Image.open(io.BytesIO(file))
                formats.add(image.format)
                assert min(image.size) >= 40
                assert max(image.size) <= 400
                if question.case.media == "video":
                    assert len(sampled_frames(image)) in (4, 6, 8), question.row
    assert formats == {"PNG", "JPEG", "WEBP", "GIF"}
    assert num_questions > 70
    images = sum(MAKERS[kind][0] for kind in ("plain", "shape", "count", "character", "where"))
    assert images == 444


def test_the_fast_paths_compute_what_transformers_does() -> None:
    check(MODEL, 16)


def test_the_text_after_a_long_clip_continues_after_its_largest_position() -> None:
    encoder, sample = Encoder(load_tokenizer(MODEL)), clip_sample(random.Random(1), (84, 84))
    sample.turns, sample.apart, sample.pictures_first = sample.turns[:1], False, True
    row = encoder.encode(sample, [(5, 3, 3)])
    located = locate_grids(len(row.ids), [GridRun(row.media_starts[0], 5, 3, 3)]).prompt
    assert torch.equal(torch.from_numpy(row.positions), located)


def test_questions_about_one_picture_do_not_see_one_another() -> None:
    """A row of separate questions gives each answer the same loss as a separate row."""
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    model.set_attn_implementation("eager")
    encoder = Encoder(load_tokenizer(MODEL))
    samples = training_samples(random.Random(3), 32)
    together = next(s for s in samples if s.apart and len(s.turns) > 1 and s.pictures)
    turns = together.turns

    def loss() -> float:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr("ops.training.seeing.batches.training_samples", lambda *_: [together])
            return float(chat_loss(model, chat_batch(random.Random(0), 1, encoder))[0])

    whole, parts = loss(), []
    for turn in turns:
        together.turns = [turn]
        weights = encoded(together, encoder).row.weights
        parts.append((loss(), sum(weights)))
    mean = sum(own * weight for own, weight in parts) / sum(weight for _, weight in parts)
    assert whole == pytest.approx(mean, rel=1e-3)


def test_clips_show_what_their_scenes_say() -> None:
    changes = set()
    for seed in range(60):
        frames, scene = draw_clip(random.Random(seed), (84, 84))
        assert len(frames) in (4, 6, 8)
        first, last = (np.asarray(frames[n], dtype=np.int16) for n in (0, -1))
        changed = np.abs(first - last).sum(axis=2) > 60
        if scene.motion and changed.any():
            changes.add(scene.motion)
        if scene.change:
            changes.add(scene.change)
        if scene.colour is None:
            assert scene.last_colour is not None
            assert not np.array_equal(first, last)
    assert changes == {"left", "right", "up", "down", "grows", "shrinks"}


@pytest.mark.parametrize("kind", ["plain", "shape", "count", "where", "character"])
def test_the_same_numbers_draw_the_same_picture(kind: str) -> None:
    picture, scene = draw_scene(random.Random(7), kind, (84, 112))
    again, same = draw_scene(random.Random(7), kind, (84, 112))
    assert (np.asarray(picture) == np.asarray(again)).all()
    assert scene == same


def test_a_call_in_training_is_one_that_the_judge_reads() -> None:
    tool = add_tool(random.Random(2))
    call = parse_call(tool.call(3, 4))
    assert call == (tool.name, dict(zip(tool.arguments, (3, 4), strict=True)))
    tool_definition = definition((tool.name, tool.arguments, tool.text))
    assert tool_definition == tool.definition()
    assert parse_call("7") is None
    assert parse_call("<tool_call>\n{}\n</tool_call>") is None


def test_a_conversation_with_a_call_is_what_the_template_writes() -> None:
    tokenizer = load_tokenizer(MODEL)
    for seed in range(4):
        sample = tool_sample(random.Random(seed), (84, 84))
        call, result = sample.turns
        name, arguments = parse_call(call.answer) or ("", {})
        assert name in [tool.name for tool in sample.tools]
        function = {"name": name, "arguments": arguments}
        messages: list[dict[str, Any]] = [
            *sample.messages(),
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": result.question},
        ]
        text = tokenizer.apply_chat_template(
            messages,
            tools=[tool.definition() for tool in sample.tools],
            tokenize=False,
            add_generation_prompt=True,
        )
        text = str(text).replace("<|image_pad|>", "<|image_pad|>" * 9)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        answer = tokenizer(f"{result.answer}<|im_end|>\n", add_special_tokens=False).input_ids
        assert encoded(sample, Encoder(tokenizer)).row.ids == ids + answer


def test_without_tools_the_template_writes_messages_alone() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}, {"type": "video"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a red star"},
    ]
    written = load_tokenizer(MODEL).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert written == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\na red star<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_mixture_lies_between_its_models(tmp_path: Path) -> None:
    own = load_file(MODEL / WEIGHTS)
    save_file({name: torch.zeros_like(weight) for name, weight in own.items()}, tmp_path / WEIGHTS)
    half = mixed([(0.5, MODEL), (0.5, tmp_path)])
    assert half.keys() == own.keys()
    for name, weight in own.items():
        torch.testing.assert_close(half[name], weight / 2)
