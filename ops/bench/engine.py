"""Compares the engine with transformers' `generate`, on the same machine and in the same run.

For each model, with one stream and with sixteen at once: tokens a second in prefill and in decode,
as a ratio of the two; then how much of the KV memory in use holds no token, against a reservation
of the model's full length for each sequence, as a cache without pages has to make.

    python -m ops.bench.engine
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from shared.config import EngineConfig, ModelConfig
from shared.sampling import SamplingParams
from shared.towers import Tower
from workers.engine.blocks import BlockPool
from workers.engine.core import Core
from workers.engine.families import family_of
from workers.engine.loader import load
from workers.engine.model import FlatModel
from workers.engine.runner import Runner
from workers.engine.sequence import Batch, EngineRequest, SampledToken

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
NUM_REPEATS = 3
PROMPT_LEN = 128
NUM_DECODED = 32
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Subject:
    name: str
    served: FlatModel
    tower: Tower | None
    reference: Any
    max_model_len: int

    @property
    def num_text_ids(self) -> int:
        """Ids below those of the special tokens, which stand at the end of the vocabulary."""
        return self.served.vocab_size // 2


@dataclass(frozen=True)
class Rates:
    """In tokens a second, all streams together."""

    prefill: float
    decode: float


@dataclass
class Occupancy:
    """Shares of the slots in use that hold no token, one entry for each step."""

    paged: list[float]
    reserved: list[float]


class WatchedRunner(Runner):
    """Counts, at each step, tokens held and slots taken by the sequences that run."""

    def __init__(self, subject: Subject, num_blocks: int) -> None:
        super().__init__(subject.served, num_blocks, BLOCK_SIZE, subject.tower)
        self._max_model_len = subject.max_model_len
        self.occupancy = Occupancy([], [])

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        tokens = super().run(batch)
        held = sum(s.sequence.num_computed_tokens + s.num_new_tokens for s in batch.scheduled)
        slots = BLOCK_SIZE * sum(len(s.sequence.block_table) for s in batch.scheduled)
        self.occupancy.paged.append(1 - held / slots)
        self.occupancy.reserved.append(1 - held / (self._max_model_len * len(batch.scheduled)))
        return tokens


# -- the two sides --------------------------------------------------------------------------------


def make_core(subject: Subject) -> tuple[Core, WatchedRunner]:
    """With room for sixteen of the benchmark's sequences, or for one of the full length."""
    num_tokens = max(16 * 2 * (PROMPT_LEN + NUM_DECODED), subject.max_model_len)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    runner = WatchedRunner(subject, num_blocks)
    core = Core(
        runner,
        lambda token_ids: "",
        frozenset(),
        pool=BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=subject.max_model_len,
        vocab_size=subject.served.vocab_size,
        # The same prompts at every repeat: it is their computation that is measured.
        prefix_caching=False,
    )
    return core, runner


def serve(core: Core, requests: list[EngineRequest]) -> float:
    """Seconds from the first request to the last token."""
    start_s = time.perf_counter()
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    return time.perf_counter() - start_s


def generate(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    token_ids = torch.tensor(prompts)
    start_s = time.perf_counter()
    model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return time.perf_counter() - start_s


def measure(run: Callable[[int], float], num_streams: int) -> Rates:
    """A run with one token is the prefill; what more tokens take beyond it is the decode."""
    run(2)
    prefill_s, decode_s = [], []
    for _ in range(NUM_REPEATS):
        prefill_s.append(run(1))
        decode_s.append(run(1 + NUM_DECODED) - prefill_s[-1])
    return Rates(
        num_streams * PROMPT_LEN / median(prefill_s), num_streams * NUM_DECODED / median(decode_s)
    )


def compare(subject: Subject, num_streams: int) -> tuple[Rates, Rates]:
    """The engine and transformers; each run has fresh prompts, so that no prefix is cached."""
    rng = random.Random(0)
    core, _ = make_core(subject)

    def prompts() -> list[list[int]]:
        return [
            [rng.randrange(subject.num_text_ids) for _ in range(PROMPT_LEN)]
            for _ in range(num_streams)
        ]

    def engine(num_tokens: int) -> float:
        return serve(core, [make_request(rng, prompt, num_tokens) for prompt in prompts()])

    def transformers(num_tokens: int) -> float:
        return generate(subject.reference, prompts(), num_tokens)

    return measure(engine, num_streams), measure(transformers, num_streams)


def measure_waste(subject: Subject) -> tuple[float, float]:
    """Mean share of slots without a token, over a mix of lengths: paged, and reserved in full."""
    rng = random.Random(1)
    core, runner = make_core(subject)
    longest = min(subject.max_model_len // 2, 256)
    requests = []
    for _ in range(32):
        prompt = [rng.randrange(subject.num_text_ids) for _ in range(rng.randint(8, longest))]
        requests.append(make_request(rng, prompt, rng.randint(8, 64)))
    serve(core, requests)
    occupancy = runner.occupancy
    return (
        sum(occupancy.paged) / len(occupancy.paged),
        sum(occupancy.reserved) / len(occupancy.reserved),
    )


def make_request(rng: random.Random, prompt: list[int], num_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return EngineRequest(f"r{rng.getrandbits(64)}", prompt, [], params)


# -- the two models -------------------------------------------------------------------------------


def demo_subject() -> Subject:
    loaded = load(ModelConfig(path=str(DEMO_MODEL)), EngineConfig())
    reference = Qwen2VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return Subject("demo model", loaded.model, loaded.tower, reference.eval(), loaded.max_model_len)


def random_subject() -> Subject:
    """About 30 million parameters, large enough for arithmetic to outweigh Python."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    text = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {"depth": 2, "embed_dim": 128, "hidden_size": 512, "num_heads": 4, "mlp_ratio": 4}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=8191,
        video_token_id=8190,
        vision_start_token_id=8189,
        vision_end_token_id=8188,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    reference = Qwen2VLForConditionalGeneration(config).eval().requires_grad_(False)
    served = FlatModel(family_of(copy.deepcopy(reference)))
    return Subject("random Qwen2-VL", served, None, reference, text["max_position_embeddings"])


# -- the report -----------------------------------------------------------------------------------


def main() -> None:
    console = Console()
    for make_subject in (demo_subject, random_subject):
        subject = make_subject()
        table = Table("streams", "phase", "engine tok/s", "transformers tok/s", "ratio")
        for num_streams in (1, 16):
            ours, theirs = compare(subject, num_streams)
            table.add_row(str(num_streams), "prefill", *_row(ours.prefill, theirs.prefill))
            table.add_row(str(num_streams), "decode", *_row(ours.decode, theirs.decode))
        paged, reserved = measure_waste(subject)
        table.title = subject.name
        table.caption = (
            f"KV slots without a token: {100 * paged:.1f} % in pages,"
            f" {100 * reserved:.1f} % reserved to the full length"
        )
        console.print(table)


def _row(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"


if __name__ == "__main__":
    main()
