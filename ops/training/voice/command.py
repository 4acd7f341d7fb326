"""Steps that make the voice of the demo.

espeak-ng (`apt-get install espeak-ng`) speaks every answer of the demo model once. A codec with one
codebook is made from the recordings, and a very small Qwen2 learns to say the codes of a text. The
product needs neither espeak-ng nor the recordings.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ops.training.folders import RECORDED_TESTS, VOICE
from ops.training.trainer import Settings, Trainer, console, stored_state
from ops.training.voice.corpus import encode_all, load_corpus, record_all
from ops.training.voice.judging import evaluate, write_recorded, write_voice_card
from ops.training.voice.talker import build_tokenizer, prompt_of
from ops.training.voice.task import Row, Talker

OUT = VOICE
MINUTES = 60.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=("short", "sentence", "description"), help="for a trial")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch")
    parser.add_argument("--width", type=int, default=128, help="width of the talker's layers")
    parser.add_argument("--layers", type=int, default=4, help="layers of the talker")
    parser.add_argument(
        "--tests", type=Path, default=RECORDED_TESTS, help="folder of the files of the tests"
    )
    parser.add_argument("--cases", type=int, default=120, help="descriptions to judge")


def record(args: Namespace) -> None:
    record_all(args.only, args.spare)


def codec(args: Namespace) -> None:
    encode_all(args.spare, args.out, args.seed)


def train(args: Namespace) -> None:
    corpus, tokenizer = load_corpus(args.spare), build_tokenizer()
    rows = [
        Row(prompt_of(tokenizer, answer.text), codes.tolist(), answer.kind)
        for answer, codes in zip(corpus.answers, corpus.codes, strict=True)
        if not answer.is_held_out
    ]
    task = Talker(rows, args.out, args.seed, args.tokens, args.width, args.layers)
    Trainer(task, Settings(args.minutes, args.checkpoint, args.clock_minutes)).run(args.resume)


def judge(args: Namespace) -> None:
    corpus = load_corpus(args.spare)
    scores = evaluate(args.out, corpus, args.cases, args.seed)
    if state := stored_state(args.checkpoint):
        write_voice_card(args.out, scores, corpus, state, args.seed)
        write_recorded(args.out, corpus, args.tests)
    else:
        console.log(f"{args.checkpoint} is missing: the card was not written")


STEPS = {"record": record, "codec": codec, "train": train, "judge": judge}
