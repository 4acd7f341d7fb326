"""Measure the sampler: 32 sequences in each step, by kind of parameters and size of the vocabulary.

Each row has the time of a step's sampling, as the engine does it, in ms; that of a plain sampler,
which sorts each row in torch, for the same filters; and the sampler's time in passes, each of which
is one read of the logits from memory. The last column is the part that sampling has of a step of an
engine core with 32 such sequences, on random weights in bfloat16: the shape of SmolLM2-135M for a
vocabulary of 49,152, and that of Qwen2.5-0.5B for 152,064.

Logits follow Zipf's law. The `peaked` ones have 0.9 of their mass in some 60 tokens, the `flat`
ones in some tens of thousands. Masks are those of a grammar of JSON over random tokens.

    python -m ops.bench.sampling [--rounds 15]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ops.bench.models import write_random_llama, write_random_qwen2
from shared.config import EngineConfig, ModelConfig
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers.cli import settings
from workers.engine.core.sequence import EngineRequest, ScheduledSequence, Sequence
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.engine.sampling.grammar import Grammar
from workers.engine.sampling.grammar_sandbox import compile_grammar
from workers.engine.sampling.verifier import sample_batch

NUM_SEQUENCES = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
WRITERS = {49_152: write_random_llama, 152_064: write_random_qwen2}
"""The writer of the model whose steps are measured, by size of the vocabulary."""
MEMORY_BYTES = 1 << 28
PEAKED, FLAT = 1.5, 1.0
"""Exponents of Zipf's law."""

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
SCHEMA = '{"type": "array", "items": {"type": ["string", "number", "null"]}}'


@dataclass(frozen=True)
class Kind:
    name: str
    params: dict[str, Any]
    exponent: float = PEAKED
    has_grammar: bool = False


KINDS = [
    Kind("greedy", {"temperature": 0}),  # First: it is part of the step that is measured.
    Kind("temperature", {"temperature": 0.8}),
    Kind("top_k 40", {"temperature": 0.8, "top_k": 40}),
    Kind("min_p 0.05", {"temperature": 0.8, "min_p": 0.05}),
    Kind("top_p 0.9", {"temperature": 0.8, "top_p": 0.9}),
    Kind("top_p 0.9, flat", {"temperature": 1.0, "top_p": 0.9}, FLAT),
    Kind("top_k 40, top_p 0.9", {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
    Kind("top_p 0.9, penalties", {"temperature": 0.8, "top_p": 0.9, **PENALTIES}),
    Kind("top_p 0.9, grammar", {"temperature": 0.8, "top_p": 0.9}, has_grammar=True),
    Kind("top_p 0.9, logprobs 5", {"temperature": 0.8, "top_p": 0.9, "logprobs": 5}),
    Kind(
        "all of these",
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, **PENALTIES},
        has_grammar=True,
    ),
]


class _Tokens:
    """Random words as a vocabulary, in the form that llguidance reads."""

    def __init__(self, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        words = [bytes([byte]) for byte in range(256)]
        letters = np.frombuffer(b'abcdefghijklmnopqrstuvwxyz ",[]0123456789', dtype=np.uint8)
        while len(words) < vocab_size:
            words.append(bytes(rng.choice(letters, rng.integers(2, 9))))
        self.tokens = words
        self.bos_token_id, self.eos_token_id = None, 0
        self.special_token_ids = [0]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def new_grammar(vocab_size: int) -> Grammar:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(vocab_size)))
    definition = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    return Grammar(compile_grammar(tokenizer, definition))


def new_logits(vocab_size: int, exponent: float) -> Tensor:
    """Return logits whose probabilities follow Zipf's law, over tokens in a random order."""
    generator = torch.Generator().manual_seed(0)
    by_rank = -exponent * torch.arange(1, vocab_size + 1).log()
    noise = 0.1 * torch.randn(NUM_SEQUENCES, vocab_size, generator=generator)
    order = torch.rand(NUM_SEQUENCES, vocab_size, generator=generator).argsort(-1)
    return (by_rank + noise).gather(-1, order)


def new_batch(kind: Kind, vocab_size: int, grammar: Grammar) -> list[ScheduledSequence]:
    rng = np.random.default_rng(0)
    params = SamplingParams(**kind.params)
    scheduled = []
    for choice in range(NUM_SEQUENCES):
        token_ids = rng.integers(0, vocab_size, PROMPT_TOKENS + OUTPUT_TOKENS).tolist()
        request = EngineRequest("bench", token_ids[:PROMPT_TOKENS], [], params)
        sequence = Sequence(request, choice, 7, token_ids, max_tokens=1024)
        if kind.has_grammar:
            sequence.token_mask = grammar.new_mask()
            for byte in b'["some':
                sequence.token_mask.advance(byte)
        scheduled.append(ScheduledSequence(sequence, 1, samples=True))
    return scheduled


def _step(logits: Tensor, scheduled: list[ScheduledSequence]) -> None:
    """Sample as a step does: the mask of a grammar is computed anew for each token."""
    for s in scheduled:
        if s.sequence.token_mask is not None:
            s.sequence.token_mask.advance(ord("e"))
    sample_batch(logits, scheduled)


def sample_plainly(logits: Tensor, params: SamplingParams) -> list[int]:
    """Sample by sorting each row, without penalties, grammars and log probabilities."""
    if params.temperature == 0:
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    ordered, order = (logits / params.temperature).sort(-1, descending=True)
    if params.top_k:
        ordered[:, params.top_k :] = -torch.inf
    probs = ordered.softmax(-1)
    if params.top_p < 1:
        probs[probs.cumsum(-1) - probs >= params.top_p] = 0
    if params.min_p:
        probs[probs < params.min_p * probs[:, :1]] = 0
    drawn: list[int] = order.gather(-1, probs.multinomial(1))[:, 0].tolist()
    return drawn


def _best_ms(call: Callable[[], object], rounds: int) -> float:
    """Return the time of the fastest call, which other processes disturb least."""
    call()
    took_ms = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        call()
        took_ms.append(1e3 * (time.perf_counter() - began_s))
    return min(took_ms)


def _ms_per_byte(rounds: int) -> float:
    memory = torch.zeros(MEMORY_BYTES // 4)
    return _best_ms(memory.amax, rounds) / MEMORY_BYTES


def _step_ms(vocab_size: int) -> float:
    """Return the time of the fastest step with 32 decodes that are greedy."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        WRITERS[vocab_size](Path(folder), settings.DEMO_MODEL)
        engine = EngineConfig(kv_cache_mib=1024)
        model = ModelConfig(folder, dtype="bfloat16", max_model_len=2 * PROMPT_TOKENS)
        core = build_core(load(model, engine), engine)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    rng = np.random.default_rng(0)
    for number in range(NUM_SEQUENCES):
        prompt = rng.integers(3, vocab_size, PROMPT_TOKENS).tolist()
        core.add(EngineRequest(str(number), prompt, [], params))
    took_ms = []
    while core.has_work:
        num_tokens, began_s = core.stats().num_batched_tokens, time.perf_counter()
        outputs = core.step()
        if len(outputs) == core.stats().num_batched_tokens - num_tokens == NUM_SEQUENCES:
            took_ms.append(1e3 * (time.perf_counter() - began_s))
    return min(took_ms)


def _sampling_ms(kind: Kind, vocab_size: int, grammar: Grammar, rounds: int) -> tuple[float, float]:
    """Return the times of the sampler and of the plain one."""
    logits = new_logits(vocab_size, kind.exponent)
    scheduled = new_batch(kind, vocab_size, grammar)
    params = scheduled[0].sequence.request.sampling
    took_ms = _best_ms(lambda: _step(logits, scheduled), rounds)
    return took_ms, _best_ms(lambda: sample_plainly(logits, params), min(rounds, 3))


@torch.inference_mode()
def report(vocab_size: int, rounds: int) -> Table:
    grammar = new_grammar(vocab_size)
    ms_per_byte = _ms_per_byte(rounds)
    step_ms = _step_ms(vocab_size)
    rest_ms = step_ms - _sampling_ms(KINDS[0], vocab_size, grammar, rounds)[0]
    pass_ms = 4 * NUM_SEQUENCES * vocab_size * ms_per_byte
    table = Table(
        title=f"{NUM_SEQUENCES} x {vocab_size:,}: {1e-6 / ms_per_byte:.1f} GB/s, a pass"
        f" {pass_ms:.2f} ms, a step {step_ms:.1f} ms",
        title_justify="left",
    )
    table.add_column("parameters")
    for name in ("ms", "plain, ms", "of plain", "passes", "share of a step"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        took_ms, plain_ms = _sampling_ms(kind, vocab_size, grammar, rounds)
        table.add_row(
            kind.name,
            f"{took_ms:.1f}",
            f"{plain_ms:.1f}",
            f"{took_ms / plain_ms:.3f}",
            f"{took_ms / pass_ms:.1f}",
            f"{took_ms / (took_ms + rest_ms):.1%}",
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    for size in WRITERS:
        Console().print(report(size, given.rounds))
