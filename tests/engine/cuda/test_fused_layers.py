"""Models with kernels against the same models as transformers has them, token for token."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
)

from shared.models.registry import adapt
from tests.models import test_generic, vision_specs
from workers.engine.cuda.cuda_graphs import CudaRecorder, Replay
from workers.engine.cuda.kernels import tiling
from workers.engine.cuda.model import GpuModel
from workers.engine.model.flat_model import BatchLayout, StepInputs
from workers.engine.model.self_check import check_against_whole

# The interpreter computes with numpy, which warns of infinities; to a GPU they are numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 12, 64
TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = {"depth": 1, "num_heads": 2, "patch_size": 14}
IDS: dict[str, Any] = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96}
PROMPTS = [[5, 9, 3, 7, 11, 2, 40], [8], list(range(20, 44))]
NUM_TOKENS = 4


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other."""
    monkeypatch.setattr(tiling, "NUM_MULTIPROCESSORS", 4)


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "qwen2_vl":
        vision: dict[str, Any] = {**VISION, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2}
        text = TEXT | {"rope_parameters": MROPE}
        return Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=text, vision_config=vision, **IDS)
        )
    if name == "qwen2_5_vl":
        vision = {**VISION, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 64}
        text = TEXT | {"rope_parameters": MROPE}
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS)
        )
    config = {
        "llama": lambda: LlamaConfig(**TEXT, mlp_bias=True, attention_bias=True),
        "mistral": lambda: MistralConfig(**TEXT, sliding_window=9, head_dim=32),
        "qwen2": lambda: Qwen2Config(
            **TEXT, use_sliding_window=True, sliding_window=9, max_window_layers=1
        ),
        "qwen3": lambda: Qwen3Config(**TEXT, head_dim=32),
        "gemma2": lambda: Gemma2Config(**TEXT, head_dim=32, sliding_window=9),
    }[name]()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def sharpen(model: PreTrainedModel) -> None:
    """Enlarge a model's initial weights, so that different inputs yield different tokens."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.25)
        elif "norm" in name and "gemma" not in model.config.model_type:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.uniform_(-0.2, 0.2)


def reference_answer(model: Any, prompt: list[int], device: torch.device) -> list[int]:
    token_ids = torch.tensor([prompt], device=device)
    output = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


@dataclass
class Served:
    """Prompts in steps, as the runner makes them: the first alone in two chunks, then all."""

    model: GpuModel
    decodes: bool

    def __post_init__(self) -> None:
        self.kv_cache = self.model.new_cache(NUM_BLOCKS, BLOCK_SIZE)
        if self.decodes:
            self.model.capture(self.kv_cache)
        self.tables = [[7, 2, 5], [0], [4, 9, 1, 10]]

    def step(self, owners: list[int], token_ids: list[list[int]], pasts: list[int]) -> list[int]:
        """The most likely next token of each sequence."""
        device = self.model.device
        starts = [0]
        for ids in token_ids:
            starts.append(starts[-1] + len(ids))
        seq_lens = [past + len(ids) for past, ids in zip(pasts, token_ids, strict=True)]
        tables = [self.tables[i] for i in owners]
        step = self.model.plan(BatchLayout(tables, starts, seq_lens), self.kv_cache)
        ranges = [torch.arange(*ends) for ends in zip(pasts, seq_lens, strict=True)]
        positions = torch.cat(ranges).expand(self.model.family.num_position_rows, -1)
        flat = torch.tensor([token_id for ids in token_ids for token_id in ids], device=device)
        rows = torch.tensor(starts[1:], device=device) - 1
        logits = self.model.forward(
            StepInputs(self.model.embed(flat), positions.to(device), step, self.kv_cache, rows)
        )
        return logits.argmax(-1).tolist()

    @torch.inference_mode()
    def answers(self) -> list[list[int]]:
        self.step([0], [PROMPTS[0][:3]], [0])
        new = [PROMPTS[0][3:], *PROMPTS[1:]]
        lens = [3, 0, 0]
        answers: list[list[int]] = [[] for _ in PROMPTS]
        for _ in range(NUM_TOKENS):
            token_ids = self.step([0, 1, 2], new, lens)
            lens = [past + len(ids) for past, ids in zip(lens, new, strict=True)]
            new = [[token_id] for token_id in token_ids]
            for answer, token_id in zip(answers, token_ids, strict=True):
                answer.append(token_id)
        return answers


def run_again(run: Replay) -> Replay:
    """In place of a CUDA graph: on the same buffers, padding included."""
    return run


def serve(model: PreTrainedModel, device: torch.device, *, decodes: bool = True) -> Served:
    """Without `decodes` there are no graphs of them, each of which runs the model once."""
    family = adapt(copy.deepcopy(model).eval().requires_grad_(False).to(device))
    record = CudaRecorder() if device.type == "cuda" else run_again
    return Served(GpuModel(family, max_num_seqs=3, max_model_len=MAX_LEN, record=record), decodes)


# The layers of those that take long are the layers of others: a window, biases, three axes.
@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen3", "llama", "gemma2", "mistral", "qwen2", "qwen2_5_vl")
        ),
    ],
)
def test_outputs_equal_the_outputs_of_transformers(device: torch.device, name: str) -> None:
    model = build(name)
    sharpen(model)
    served = serve(model, device)
    assert served.model.is_fused == (name != "gemma2")
    answers = served.answers()
    # The chunk and the prompts are no decodes.
    assert (served.model.num_graph_steps, served.model.num_eager_steps) == (NUM_TOKENS - 1, 2)
    model = model.eval().to(device)
    expected = [reference_answer(model, prompt, device) for prompt in PROMPTS]
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) > 1


def logits_of(served: Served, positions: Tensor) -> Tensor:
    device = served.model.device
    num_tokens = positions.shape[1]
    layout = BatchLayout([[3]], [0, num_tokens], [num_tokens])
    step = served.model.plan(layout, served.kv_cache)
    token_ids = torch.arange(10, 10 + num_tokens, device=device)
    rows = torch.arange(num_tokens, device=device)
    embeddings = served.model.embed(token_ids)
    return served.model.forward(
        StepInputs(embeddings, positions.to(device), step, served.kv_cache, rows)
    )


@torch.inference_mode()
def test_without_graphs_all_steps_run_eagerly(device: torch.device) -> None:
    def refuse(run: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    served = serve(build("qwen2_vl"), device, decodes=False)
    positions = torch.zeros(3, 1, dtype=torch.int64)
    before = logits_of(served, positions)
    served.model._record = refuse
    with structlog.testing.capture_logs() as logs:
        served.model.capture(served.kv_cache)
    assert [(log["event"], log["reason"]) for log in logs] == [
        ("graphs_not_recorded", "operation not permitted when stream is capturing")
    ]
    assert logits_of(served, positions).equal(before)
    assert (served.model.num_graph_steps, served.model.num_eager_steps) == (0, 2)


@torch.inference_mode()
def test_positions_in_three_axes_turn_as_in_transformers(device: torch.device) -> None:
    model = build("qwen2_vl")
    sharpen(model)
    positions = torch.tensor([[0, 1, 1, 1, 4], [0, 1, 1, 2, 4], [0, 1, 2, 1, 4]])
    logits = logits_of(serve(model, device, decodes=False), positions)
    expected = (
        model.eval()
        .to(device)(
            input_ids=torch.arange(10, 15, device=device)[None],
            position_ids=positions[:, None].to(device),
            attention_mask=torch.ones(1, 5, device=device),
        )
        .logits[0]
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_concatenated_projections_share_one_copy_of_the_weights(device: torch.device) -> None:
    served = serve(build("llama"), device, decodes=False)
    decoder: Any = served.model.family.decoder
    attention = decoder.layers[0].self_attn
    weight, bias = attention.qkv
    assert attention.k_proj.weight.data_ptr() == weight[64:].data_ptr()
    assert bias[64:96].equal(attention.k_proj.bias)


def test_graphs_over_an_earlier_cache_are_dropped_before_new_ones(device: torch.device) -> None:
    """The cache that memory is measured with is smaller than the cache of requests."""
    kept: list[object] = []

    def record(run: Replay) -> Replay:
        kept.append(model._graphs)
        return run_again(run)

    family = adapt(build("llama").eval().requires_grad_(False).to(device))
    model = GpuModel(family, max_num_seqs=1, max_model_len=MAX_LEN, record=record)
    for _ in range(2):
        model.capture(model.new_cache(NUM_BLOCKS, BLOCK_SIZE))
    assert kept == [None, None]


@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", "gemma3", pytest.param("gemma4_text", marks=pytest.mark.long), "deepseek_v3"],
)
def test_kernels_pass_the_check_of_generic_types(model_type: str) -> None:
    """The images of Gemma 3 are spans, which the kernels leave to torch."""
    spec = vision_specs.SPECS.get(model_type)
    if spec is None:
        model = test_generic.build(model_type, **test_generic.SPECS[model_type])
    else:
        config = vision_specs.make_config(model_type, spec.sizes, **spec.config)
        model = vision_specs.draw_model(config, spec.seed)
    served: Any = model.float()
    check_against_whole(GpuModel(adapt(served), max_num_seqs=2, max_model_len=64), 16)
