"""Load of an engine and of transformers' continuous batching on one model, and their rates."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from shared.models.registry import adapt
from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.cuda.model import GpuModel
from workers.engine.runner import ModelRunner

BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Shape:
    """Shape of the language model of a Qwen2-VL."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool


SHAPES = {
    "1.5B": Shape("1.5B", 1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape("7B", 3584, 18944, 28, 28, 4, 152064, False),
}
TINY = Shape("tiny", 64, 96, 2, 4, 2, 199, True)


@dataclass(frozen=True)
class Load:
    """Prompts of one length, all present at the start, and the number of new tokens for each."""

    num_streams: int
    prompt_len: int
    num_new: int

    @property
    def max_len(self) -> int:
        return self.prompt_len + self.num_new

    def prompts(self, vocab_size: int) -> list[list[int]]:
        rng = random.Random(0)
        return [
            [rng.randrange(vocab_size // 2) for _ in range(self.prompt_len)]
            for _ in range(self.num_streams)
        ]


@dataclass(frozen=True)
class Rates:
    """Tokens per second, of all streams together."""

    prefill: float
    decode: float


def rates_of(load: Load, began_s: float, times: list[list[float]]) -> Rates:
    """Compute rates from the times of every stream's tokens.

    Decoding counts while all streams do nothing else.
    """
    first_s, last_s = max(each[0] for each in times), min(each[-1] for each in times)
    decoded = sum(first_s < at <= last_s for each in times for at in each)
    decode_s = last_s - first_s
    return Rates(
        load.num_streams * load.prompt_len / (first_s - began_s),
        decoded / decode_s if decode_s > 0 else 0.0,
    )


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    served: Qwen2ForCausalLM = model.to(dtype).eval().requires_grad_(False)
    return served


def step_bytes(model: Any) -> int:
    """Return the bytes of weights that a decode of one stream reads, with one row of embeddings."""
    embeddings = model.get_input_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    tied = model.get_output_embeddings().weight is embeddings
    return int(total if tied else total - embeddings.nbytes)


def _decode_nothing(token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
    return ""


class Engine:
    """An engine core over a model, which it changes: measure others on the model first."""

    def __init__(self, model: Qwen2ForCausalLM, load: Load) -> None:
        self._load = load
        # The core allocates ahead, so this is one block more than the tokens need.
        num_blocks = load.num_streams * (-(-load.max_len // BLOCK_SIZE) + 1)
        served = GpuModel(adapt(model), max_num_seqs=load.num_streams, max_model_len=load.max_len)
        self.vocab_size = served.vocab_size
        self.core = EngineCore(
            ModelRunner(served, num_blocks, BLOCK_SIZE),
            _decode_nothing,
            frozenset(),
            pool=BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=load.num_streams,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=load.max_len,
            vocab_size=served.vocab_size,
            prefix_caching=False,
        )

    def add(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=self._load.num_new, ignore_eos=True)
        for i, prompt in enumerate(self._load.prompts(self.vocab_size)):
            self.core.add(EngineRequest(f"r{i}", prompt, [], params))

    def measure(self) -> Rates:
        began_s = time.perf_counter()
        self.add()
        times: dict[str, list[float]] = {}
        while self.core.has_work:
            outputs = self.core.step()
            now_s = time.perf_counter()
            for output in outputs:
                count = sum(len(choice.token_ids) for choice in output.choices)
                times.setdefault(output.request_id, []).extend([now_s] * count)
        return rates_of(self._load, began_s, list(times.values()))

    def prefill(self) -> None:
        """Run until all streams decode and do nothing else."""
        self.add()
        begun: set[str] = set()
        while len(begun) < self._load.num_streams:
            begun |= {output.request_id for output in self.core.step()}

    def decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.core.step()


def measure_transformers(model: Any, load: Load) -> Rates:
    outputs = model.generate_batch(
        load.prompts(model.config.vocab_size),
        generation_config=GenerationConfig(
            max_new_tokens=load.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
            max_requests_per_batch=load.num_streams,
            allow_block_sharing=False,
            # On a CPU, the amount of memory is unknown.
            num_blocks=None if model.device.type == "cuda" else 64,
        ),
        record_timestamps=True,
        progress_bar=False,
    )
    times = [output.timestamps for output in outputs.values()]
    return rates_of(load, min(output.created_time for output in outputs.values()), times)
