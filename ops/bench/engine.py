"""Compare the engine with transformers' `generate`, on the same machine and in the same run.

The engine is loaded as its worker loads it; each table says whether it ran on the C++ kernels or on
torch. For each model, with one stream and with sixteen at once: tokens per second in prefill and in
decode, as a ratio of the two; then the share of the KV memory in use that holds no token, against a
reservation of the model's full length for each sequence, as a cache without pages requires.

    python -m ops.bench.engine
"""

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from ops.bench.models import TOKENIZER_FILES
from ops.harness.tables import console, print_table
from shared.config.schema import EngineConfig, ModelConfig
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import Batch, EngineRequest, SampledToken
from workers.engine.cpu.decoder import NativeModel
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.settings import DEMO_MODEL

NUM_REPEATS = 3
PROMPT_LEN = 128
NUM_DECODED = 64
# Each run has new prompts, because their computation is measured.
ENGINE = EngineConfig(max_num_seqs=16, prefix_caching=False)


@dataclass(frozen=True)
class Subject:
    name: str
    core: EngineCore
    reference: Any
    max_model_len: int
    num_text_ids: int
    """Return ids below those of the special tokens, which are at the end of the vocabulary."""

    @classmethod
    def load(cls, name: str, folder: Path) -> "Subject":
        reference: Any = Qwen2VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        )
        text = reference.config.get_text_config()
        core = build_core(load(ModelConfig(path=str(folder)), ENGINE), ENGINE)
        return cls(name, core, reference.eval(), text.max_position_embeddings, text.vocab_size // 2)

    @property
    def path(self) -> str:
        """Name of the kernels on which the engine's steps run."""
        native = isinstance(self.core._runner._model, NativeModel)  # type: ignore[attr-defined]
        return "C++ kernels" if native else "torch"


@dataclass(frozen=True)
class Rates:
    """Tokens per second, of all streams together."""

    prefill: float
    decode: float


@dataclass
class Seconds:
    """Measurements, one for each repeat."""

    prefill: list[float]
    decode: list[float]

    def rates(self, num_streams: int) -> Rates:
        return Rates(
            num_streams * PROMPT_LEN / median(self.prefill),
            num_streams * NUM_DECODED / median(self.decode),
        )


@dataclass
class Occupancy:
    """Shares of the slots in use that hold no token, one for each step."""

    paged: list[float]
    reserved: list[float]


def watch(subject: Subject) -> Occupancy:
    """Count, at each step from now on, the tokens and the slots of the running sequences."""
    occupancy = Occupancy([], [])
    runner, block_size = subject.core._runner, subject.core._pool.block_size
    run = runner.run

    def watched(batch: Batch) -> list[list[SampledToken]]:
        tokens = run(batch)
        held = sum(s.sequence.num_computed_tokens + s.num_new_tokens for s in batch.scheduled)
        slots = block_size * sum(len(s.sequence.block_table) for s in batch.scheduled)
        occupancy.paged.append(1 - held / slots)
        occupancy.reserved.append(1 - held / (subject.max_model_len * len(batch.scheduled)))
        return tokens

    runner.run = watched  # type: ignore[method-assign]
    return occupancy


# -- the two sides --------------------------------------------------------------------------------


def serve(core: EngineCore, requests: list[EngineRequest]) -> float:
    """Return the seconds from the first request to the last token."""
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


def compare(subject: Subject, num_streams: int) -> tuple[Rates, Rates]:
    """Measure the engine and transformers in turns; each run has new prompts.

    A run with one token is the prefill; the time of further tokens is the decode.
    """
    rng = random.Random(0)

    def prompts() -> list[list[int]]:
        return [
            [rng.randrange(subject.num_text_ids) for _ in range(PROMPT_LEN)]
            for _ in range(num_streams)
        ]

    def engine(num_tokens: int) -> float:
        requests = [make_request(rng, prompt, num_tokens) for prompt in prompts()]
        return serve(subject.core, requests)

    def transformers(num_tokens: int) -> float:
        return generate(subject.reference, prompts(), num_tokens)

    for run in (engine, transformers):
        run(2)
    ours, theirs = Seconds([], []), Seconds([], [])
    for _ in range(NUM_REPEATS):
        for run, seconds in ((engine, ours), (transformers, theirs)):
            seconds.prefill.append(run(1))
            seconds.decode.append(run(1 + NUM_DECODED) - seconds.prefill[-1])
    return ours.rates(num_streams), theirs.rates(num_streams)


def measure_waste(subject: Subject) -> tuple[float, float]:
    """Return the mean share of slots without a token over a mix of lengths: paged, and reserved."""
    rng = random.Random(1)
    occupancy = watch(subject)
    longest = min(subject.max_model_len // 2, 256)
    requests = []
    for _ in range(32):
        prompt = [rng.randrange(subject.num_text_ids) for _ in range(rng.randint(8, longest))]
        requests.append(make_request(rng, prompt, rng.randint(8, 64)))
    serve(subject.core, requests)
    return mean(occupancy.paged), mean(occupancy.reserved)


def make_request(rng: random.Random, prompt: list[int], num_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return EngineRequest(f"r{rng.getrandbits(64)}", prompt, [], params)


# -- the second model -----------------------------------------------------------------------------


def write_random(folder: Path) -> None:
    """Write a model of about 30 million parameters, whose arithmetic outweighs Python's."""
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
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder)


# -- the report -----------------------------------------------------------------------------------


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        write_random(Path(folder))
        for name, path in (("demo model", DEMO_MODEL), ("random Qwen2-VL", Path(folder))):
            report(Subject.load(name, path))


def report(subject: Subject) -> None:
    rows = []
    for num_streams in (1, 16):
        ours, theirs = compare(subject, num_streams)
        rows.append((num_streams, "prefill", *_row(ours.prefill, theirs.prefill)))
        rows.append((num_streams, "decode", *_row(ours.decode, theirs.decode)))
    paged, reserved = measure_waste(subject)
    columns = ("streams", "phase", "engine tok/s", "transformers tok/s", "ratio")
    print_table(f"{subject.name}, engine on {subject.path}", columns, rows, num_texts=2)
    console.print(
        f"KV slots without a token: {100 * paged:.1f} % in pages,"
        f" {100 * reserved:.1f} % reserved to the full length"
    )


def _row(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"


if __name__ == "__main__":
    main()
