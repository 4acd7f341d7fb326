"""Make the demo's voice: recordings, codec, talker, and a card of how well it is understood.

Everything that the demo model can answer is spoken once by espeak-ng (`apt-get install espeak-ng`).
A codec of one codebook is made of the recordings, and a very small Qwen2 learns to say the codes of
a text. The product needs neither espeak-ng nor the recordings.

    python -m ops.training.voice record codec train judge

The learning rate follows the CPU time, so that a run always ends well whatever the machine; a run
is therefore seeded but not reproducible to the bit. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from ops.training.trainer import MuonState
from ops.training.voice.batches import Row
from ops.training.voice.card import write_card
from ops.training.voice.corpus import Corpus, encode_all, load_corpus, record_all
from ops.training.voice.evaluation import evaluate
from ops.training.voice.recorded_tests import write_recorded
from ops.training.voice.talker import build_tokenizer, prompt_of
from ops.training.voice.trainer import Settings, Trainer

STEPS = ("record", "codec", "train", "judge")


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[2] / "demo_voice"
    spare = Path(tempfile.gettempdir()) / "pagemill_demo_voice"
    parser = argparse.ArgumentParser(
        description="Train and judge the demo's voice on recordings made by espeak-ng.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("steps", nargs="+", choices=STEPS, help="what to do, in this order")
    parser.add_argument("--out", type=Path, default=here, help="folder of the voice")
    parser.add_argument("--spare", type=Path, default=spare, help="recordings and checkpoint")
    recorded = here.parents[1] / "tests" / "recorded"
    parser.add_argument("--tests", type=Path, default=recorded, help="what the tests compare with")
    parser.add_argument("--only", choices=("short", "sentence", "description"), help="for a trial")
    parser.add_argument("--minutes", type=float, default=60.0, help="CPU time of training")
    parser.add_argument("--seed", type=int, default=0, help="of codec, batches and weights")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch")
    parser.add_argument("--width", type=int, default=128, help="of the talker's layers")
    parser.add_argument("--layers", type=int, default=4, help="of the talker")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--cases", type=int, default=120, help="descriptions to judge")
    return parser.parse_args()


def rows_of(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """What the talker is trained on; the held-out descriptions are not in it."""
    return [
        Row(prompt_of(tokenizer, answer.text), codes.tolist(), answer.kind)
        for answer, codes in zip(corpus.answers, corpus.codes, strict=True)
        if not answer.is_held_out
    ]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if "record" in args.steps:
        record_all(args.only, args.spare)
    if "codec" in args.steps:
        encode_all(args.spare, args.out, args.seed)
    checkpoint = args.spare / "talker.pt"
    settings = Settings(
        args.seed, args.out, checkpoint, args.minutes, args.tokens, args.width, args.layers
    )
    if "train" in args.steps:
        trainer = Trainer(settings, rows_of(load_corpus(args.spare), build_tokenizer()))
        if args.resume:
            trainer.load()
        trainer.run()
    if "judge" in args.steps:
        corpus = load_corpus(args.spare)
        scores = evaluate(args.out, corpus, args.cases, args.seed)
        state = MuonState(**torch.load(checkpoint)["state"])
        write_card(args.out, scores, corpus, settings, state)
        write_recorded(args.out, corpus, args.tests)


if __name__ == "__main__":
    main()
