"""The C++ kernels yield the tokens of transformers and the logits of the torch path."""

import copy
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shared.config.schema import EngineConfig, ModelConfig
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.native import library, targets
from tests import preloaded
from tests.engine.model.test_parity import (
    DEMO_MODEL,
    TEXT,
    RandomSchedule,
    Twins,
    answers_of,
    build,
    make_cases,
    run_schedule,
    widen,
)
from workers.engine.cpu.decoder import NativeModel, unsupported_reason
from workers.engine.loader import load
from workers.engine.model.flat_model import BatchLayout, DecoderModel, FlatModel, StepInputs

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS = 64
PART_OF_A_HEAD = {
    "rope_type": "linear",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "partial_rotary_factor": 0.5,
}
ROOT = Path(__file__).parents[3]
needs_kernels = pytest.mark.skipif(library.load() is None, reason="no compiler, or no AVX-512")


def make_native(model: PreTrainedModel, block_size: int = 8, num_threads: int = 2) -> NativeModel:
    family = adapt(copy.deepcopy(model))
    assert unsupported_reason(family, block_size) is None
    return NativeModel(family, num_threads)


# -- against transformers -------------------------------------------------------------------------


def make_model(name: str) -> PreTrainedModel:
    if name == "windows":
        # Narrower than a prompt, and no multiple of a block or of the kernels' groups of tokens.
        model: PreTrainedModel = MistralForCausalLM(MistralConfig(**TEXT, sliding_window=11))
    else:
        model = build(name)
    model = model.eval().requires_grad_(False)
    widen(model)
    return model


@needs_kernels
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "windows"], scope="module"
)
def test_any_schedule_yields_the_tokens_of_generate(name: str) -> None:
    model = make_model(name)
    whole = adapt(model)
    tower = None if whole.tower is None else Tower(whole.tower, model)
    answers: dict[str, list[int]] = {}
    for max_chunk, preempt_share, block_size in ((100, 0.0, 8), (7, 0.0, 16), (13, 0.05, 24)):
        twins = Twins(model, make_native(model, block_size), tower, answers)
        cases = make_cases(twins.sees)
        rng = random.Random(max_chunk)
        schedule = RandomSchedule(rng, 512 // block_size, block_size, max_chunk, preempt_share)
        assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)


@needs_kernels
def test_the_loader_uses_the_kernels_where_possible() -> None:
    model = ModelConfig(path=str(DEMO_MODEL))
    assert isinstance(load(model, EngineConfig()).model, NativeModel)
    assert isinstance(load(model, EngineConfig(kernels="torch")).model, FlatModel)
    # Eight tokens lie next to one another in the kernels' cache.
    assert isinstance(load(model, EngineConfig(block_size=4)).model, FlatModel)


@needs_kernels
def test_a_pool_uses_the_configured_memory(tmp_path: Path) -> None:
    """Values of 40 dimensions lie in rows of 64."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    config = LlamaConfig(**{**TEXT, "hidden_size": 160, "eos_token_id": 0})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded = load(ModelConfig(path=str(tmp_path)), EngineConfig(kv_cache_mib=16))
    assert isinstance(loaded.model, NativeModel)
    cache = loaded.model.new_cache(loaded.num_blocks, loaded.block_size)
    num_bytes = sum(tensor.nbytes for layer in cache for tensor in layer)
    assert 16 * 2**20 - num_bytes // loaded.num_blocks < num_bytes <= 16 * 2**20


# -- against the torch path -----------------------------------------------------------------------


class Pair:
    """The same steps through both models, each with a separate cache."""

    def __init__(self, model: PreTrainedModel, block_size: int = 8, num_threads: int = 2) -> None:
        flat = FlatModel(adapt(copy.deepcopy(model)))
        native = make_native(model, block_size, num_threads)
        self._sides: list[tuple[DecoderModel, Any]] = [
            (side, side.new_cache(NUM_BLOCKS, block_size)) for side in (flat, native)
        ]
        order = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._tables = [order[i::4] for i in range(4)]
        self._lens = [0] * 4
        self._rng = random.Random(1)

    @torch.inference_mode()
    def step(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """So many tokens of each of the four sequences; logits of all rows, both ways."""
        taking = [i for i, length in enumerate(lengths) if length]
        starts = [0]
        positions: list[int] = []
        for i in taking:
            positions += range(self._lens[i], self._lens[i] + lengths[i])
            self._lens[i] += lengths[i]
            starts.append(starts[-1] + lengths[i])
        token_ids = torch.tensor([self._rng.randrange(190) for _ in positions])
        logits = []
        for model, cache in self._sides:
            rows = torch.tensor(positions).expand(model.family.num_position_rows, -1)
            tables = [self._tables[i] for i in taking]
            layout = BatchLayout(tables, starts, [self._lens[i] for i in taking])
            plan = model.plan(layout, cache)
            every = torch.arange(len(positions))
            inputs = StepInputs(model.embed(token_ids), rows, plan, cache, every)
            logits.append(model.forward(inputs).float())
        return logits[0], logits[1]


STEPS = ((37, 5, 0, 1), (1, 1, 9, 1), (20, 0, 1, 1), (1, 40, 1, 13), (0, 0, 0, 1), (1, 1, 1, 1))
SHAPES = [
    # hidden, heads, KV heads, head_dim, MLP: groups of 1 to 14 heads, dimensions that fill no panel
    (64, 4, 4, 16, 96),
    (96, 14, 1, 24, 112),
    (64, 13, 1, 40, 64),
    (128, 6, 2, 80, 208),
    (48, 4, 2, 256, 80),
    # Rows so wide that some tens of them fill the cache, and go through a matrix by themselves.
    (512, 8, 2, 64, 4096),
]


@needs_kernels
@pytest.mark.parametrize(("hidden", "heads", "kv_heads", "head_dim", "inner"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_shape(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, num_threads: int
) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            **TEXT,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
        },
        head_dim=head_dim,
        attention_bias=True,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    widen(model)
    pair = Pair(model, num_threads=num_threads)
    for lengths in STEPS:
        torch.testing.assert_close(*pair.step(lengths), rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2_vl"])
def test_bfloat16_is_as_near_to_float32_as_torch_is(name: str) -> None:
    """Both round, at different places; neither may be further from the truth by much."""
    model = build(name).eval().requires_grad_(False)
    widen(model)
    model = model.to(torch.bfloat16)
    rounded, exact = Pair(model), Pair(copy.deepcopy(model).float())
    for lengths in STEPS:
        truth, _ = exact.step(lengths)
        theirs, ours = ((logits - truth).square().mean() for logits in rounded.step(lengths))
        assert ours < 1.5 * theirs


@needs_kernels
def test_a_long_context_and_then_a_short_one() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TEXT)).eval().requires_grad_(False)
    widen(model)
    pair = Pair(model, block_size=64)
    for lengths in ((900, 3, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0)):
        torch.testing.assert_close(*pair.step(lengths), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_nan_stays_within_its_sequence() -> None:
    """Sequences do not see each other; a NaN stays visible in its own sequence."""
    model = LlamaForCausalLM(LlamaConfig(**TEXT)).eval().requires_grad_(False)
    native = make_native(model)
    cache = native.new_cache(4, 8)
    with torch.inference_mode():
        embeddings = native.embed(torch.tensor([1, 2, 3, 1, 2, 3]))
        embeddings[4] = torch.nan
        plan = native.plan(BatchLayout([[0], [1]], [0, 3, 6], [3, 3]), cache)
        positions = torch.arange(3).repeat(2)[None]
        logits = native.forward(StepInputs(embeddings, positions, plan, cache, torch.arange(6)))
    assert logits[:3].isfinite().all()
    assert logits[5].isnan().all()


@needs_kernels
def test_levels_are_added_after_the_first_layers() -> None:
    """Qwen3-VL's decoder adds intermediate features of its tower (deepstack)."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=16)).eval().requires_grad_(False)
    widen(model)
    levels = torch.randn(2, 5, TEXT["hidden_size"])
    token_ids = torch.arange(5)
    native = make_native(model)
    cache = native.new_cache(1, 8)
    with torch.inference_mode():
        plan = native.plan(BatchLayout([[0]], [0, 5], [5]), cache)
        embeddings = native.embed(token_ids)
        ours = native.forward(
            StepInputs(embeddings, token_ids[None], plan, cache, token_ids, deepstack=levels)
        )
        for layer, level in zip(model.model.layers, levels, strict=False):
            layer.register_forward_hook(lambda _, __, output, level=level: output + level)
        theirs = model(token_ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- threads --------------------------------------------------------------------------------------


LEAVES_IN_THE_MIDDLE = """
import threading, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from shared.models.registry import adapt
from workers.engine.cpu.decoder import NativeModel
from workers.engine.model.flat_model import BatchLayout, StepInputs

config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
native = NativeModel(adapt(LlamaForCausalLM(config).requires_grad_(False)), 2)
cache = native.new_cache(256, 8)
positions = torch.arange(2048)
plan = native.plan(BatchLayout([range(256)], [0, 2048], [2048]), cache)
embeddings = torch.randn(2048, 512)

def step():
    with torch.inference_mode():
        while True:
            native.forward(StepInputs(embeddings, positions[None], plan, cache, positions[:1]))

threading.Thread(target=step, daemon=True).start()
time.sleep(0.5)
"""


@needs_kernels
def test_a_process_can_exit_during_a_step() -> None:
    command = [*preloaded.PYTHON, "-c", LEAVES_IN_THE_MIDDLE]
    assert subprocess.run(command, cwd=ROOT, timeout=100).returncode == 0


# -- where there are none -------------------------------------------------------------------------


def _with(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**TEXT, **changes}))


@pytest.mark.parametrize(
    ("make", "block_size", "reason"),
    [
        (lambda: _with(hidden_act="gelu"), 8, "its MLP is of another kind"),
        (lambda: _with(mlp_bias=True), 8, "its MLP is of another kind"),
        (lambda: _with(hidden_size=72), 8, "its sizes are not multiples of 16"),
        (lambda: _with(head_dim=12), 8, "its heads have 12 dimensions"),
        (
            lambda: _with(rope_parameters=PART_OF_A_HEAD),
            8,
            "its rotary embedding rotates only a part of each head",
        ),
        (lambda: _with(), 4, "blocks of 4 tokens are not multiples of 8"),
        (lambda: _with().half(), 8, "its weights are torch.float16"),
    ],
)
def test_unsupported_models_run_on_torch(
    make: Callable[[], PreTrainedModel], block_size: int, reason: str
) -> None:
    assert unsupported_reason(adapt(make()), block_size) == reason


def test_without_kernels_models_run_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    loaded = load(ModelConfig(path=str(DEMO_MODEL)), EngineConfig())
    assert isinstance(loaded.model, FlatModel)


class Names:
    """A library that records which functions are declared."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        self.names.append(name)
        return SimpleNamespace()


@pytest.fixture
def fresh_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    # The library compiled here is only opened; nothing is computed with it. So its functions are
    # empty, because the real kernels take seconds to compile.
    library._declare(declared := Names())  # type: ignore[arg-type]
    source = tmp_path_factory.mktemp("source") / "empty.cpp"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in declared.names))
    monkeypatch.setattr(targets, "SOURCES", (str(source),))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_without_a_compiler_there_are_no_kernels(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.load() is None


@needs_kernels
def test_a_cache_that_others_can_write_is_not_executed(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.load.cache_clear()
    folder = tmp_path / "pagemill"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.load() is None
    folder.chmod(0o700)
    library.load.cache_clear()
    assert library.load() is not None
    (file,) = folder.iterdir()
    assert file.suffix == ".so"
    # A file truncated by a power cut is compiled again.
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:100])
    library.load.cache_clear()
    assert library.load() is not None


@needs_kernels
def test_files_of_a_killed_compiler_are_removed(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "pagemill"
    folder.mkdir(mode=0o700)
    stale, of_another, no_build = (folder / name for name in ("build-old", "build-new", "other"))
    for left_over in (stale, of_another, no_build):
        left_over.mkdir()
        (left_over / "native.so").write_bytes(b"part")
    long_ago = time.time() - library.STALE_AFTER_S - 1
    for left_over in (stale, no_build):
        os.utime(left_over, (long_ago, long_ago))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    assert library.load() is not None
    left = {file.name for file in folder.iterdir() if file.suffix != ".so"}
    assert left == {"build-new", "other"}
