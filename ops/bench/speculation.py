"""Measure the gain of draft tokens: one engine with and without them, taking turns.

Answers are of two kinds: those that quote their prompt, as it requests, and those that do not. The
table has tokens per second as a ratio of the two, each at its best, because disturbances only add
time; the share of drafts that were accepted; and the tokens of an answer per step.

    python -m ops.bench.models smollm2 FOLDER
    python -m ops.bench.speculation FOLDER
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shared.config import EngineConfig, ModelConfig, SpeculativeConfig
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core

NUM_STREAMS = (1, 2, 4, 8)
NUM_REPEATS = 5
# The passages are about this long.
NUM_TOKENS = 64
PASSAGES = (
    "The harbour of the old town lies behind two walls of grey stone. In the morning the boats"
    " come in with herring and mackerel, and the women of the quay sort the fish into baskets. By"
    " noon the market is empty, the gulls have taken what was left, and the nets hang in the sun"
    " to dry.",
    "A pump moves water from the well to a tank on the roof. A float in the tank opens a switch"
    " when the tank is full, and closes it again when a third of the water is gone. If the well"
    " runs dry, a second switch stops the pump, and a red lamp above the door tells whoever passes"
    " by.",
)
KINDS = {
    "repeating": [f"Repeat the following text word for word.\n\n{text}" for text in PASSAGES],
    "other": [
        "Write a short story about a girl who finds a key on the beach.",
        "Why is the sky blue, and why is it red in the evening?",
    ],
}


@dataclass(frozen=True)
class Run:
    seconds: float
    answers: list[list[int]]
    num_steps: int


@dataclass(frozen=True)
class Drafts:
    """Measurements of several runs together."""

    num_drafts: int
    num_accepted: int
    num_steps: int

    @classmethod
    def of(cls, core: EngineCore) -> "Drafts":
        stats = core.stats()
        return cls(stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_steps)


def serve(core: EngineCore, prompts: list[list[int]]) -> Run:
    """Answer greedily; prompts of earlier runs are found in the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(str(i), prompt, [], params))
    answers: list[list[int]] = [[] for _ in prompts]
    num_steps, start_s = core.stats().num_steps, time.perf_counter()
    while core.has_work:
        for output in core.step():
            for delta in output.choices:
                answers[int(output.request_id)] += delta.token_ids
    seconds = time.perf_counter() - start_s
    return Run(seconds, answers, core.stats().num_steps - num_steps)


def compare(without: EngineCore, drafting: EngineCore, prompts: list[list[int]]) -> tuple[str, ...]:
    for core in (without, drafting):
        serve(core, prompts)
    before = Drafts.of(drafting)
    turns, same = [], True
    for _ in range(NUM_REPEATS):
        plain, drafted = serve(without, prompts), serve(drafting, prompts)
        turns.append((plain.seconds, drafted.seconds))
        same &= plain.answers == drafted.answers
    after = Drafts.of(drafting)
    best_plain, best_drafted = map(min, zip(*turns, strict=True))
    num_drafts = after.num_drafts - before.num_drafts
    share = (after.num_accepted - before.num_accepted) / max(1, num_drafts)
    num_steps = (after.num_steps - before.num_steps) / NUM_REPEATS
    return (
        f"{best_plain / best_drafted:.2f}",
        f"{median(plain / drafted for plain, drafted in turns):.2f}",
        f"{100 * share:.0f} %",
        f"{NUM_TOKENS / num_steps:.1f}",
        "yes" if same else "no",
    )


def tokenize(model: Path, questions: list[str]) -> list[list[int]]:
    """Tokenize by the model's chat template.

    The tokenizer's own file splits the words, not its class, because files converted from GGUF may
    name another class.
    """
    chat, tokenizer = (
        AutoTokenizer.from_pretrained(model),
        Tokenizer.from_file(str(model / "tokenizer.json")),
    )
    texts = [
        chat.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder, of a model that follows instructions")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--torch", action="store_true", help="without the C++ kernels")
    parser.add_argument("--num-tokens", type=int, default=8)
    parser.add_argument("--min-ngram", type=int, default=SpeculativeConfig().min_ngram)
    parser.add_argument("--max-ngram", type=int, default=SpeculativeConfig().max_ngram)
    parser.add_argument("--max-step-tokens", type=int, default=SpeculativeConfig().max_step_tokens)
    given = parser.parse_args()
    model = ModelConfig(path=str(given.model), dtype=given.dtype, max_model_len=1024)
    drafts = SpeculativeConfig(
        num_tokens=given.num_tokens,
        min_ngram=given.min_ngram,
        max_ngram=given.max_ngram,
        max_step_tokens=given.max_step_tokens,
    )
    plain = EngineConfig(kernels="torch" if given.torch else "measured", kv_cache_mib=512)
    speculative = EngineConfig(kernels=plain.kernels, kv_cache_mib=512, speculative=drafts)
    without = build_core(load(model, plain), plain)
    drafting = build_core(load(model, speculative), speculative)
    prompts_of = {kind: tokenize(given.model, questions) for kind, questions in KINDS.items()}
    table = Table(
        "answers",
        "at once",
        "ratio",
        "median of turns",
        "accepted",
        "tokens a step",
        "same answers",
    )
    for kind, questions in KINDS.items():
        for num_streams in NUM_STREAMS:
            prompts = [prompts_of[kind][i % len(questions)] for i in range(num_streams)]
            table.add_row(kind, str(num_streams), *compare(without, drafting, prompts))
    Console().print(table)


if __name__ == "__main__":
    main()
