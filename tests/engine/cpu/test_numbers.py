"""Decoders whose weights stay numbers on the C++ kernels answer like their dequantized twins."""

import copy
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from shared.config.schema import EngineConfig, ModelConfig
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.native.matrices import Format
from shared.vision.weights import load_weights
from tests import quantized_checkpoints
from tests.engine.cpu.test_native import STEPS, Pair, needs_kernels
from tests.engine.model.test_parity import (
    DEMO_MODEL,
    RandomSchedule,
    Twins,
    answers_of,
    build,
    make_cases,
    run_schedule,
    widen,
)
from tests.quantized_checkpoints import (
    FORMS,
    FP8_BLOCKS,
    Form,
    copy_quantized,
    fp8_blocks,
    quantize,
)
from workers.engine.cpu.decoder import NativeModel
from workers.engine.loader import load
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.int8 import quantized_layers
from workers.engine.model.quantized_linear import QuantizedLinear
from workers.engine.model.quantizer import QuantizedConfig

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_kernels]

KEPT = {
    "fp8_tensor": Format.FP8,
    "float_channels": Format.FP8,
    "int8_channels": Format.INT8,
    "packed_int4": Format.INT4,
    "packed_int4_zeros": Format.INT4_ZEROS,
    "awq": Format.INT4_ZEROS,
    "gptq": Format.INT4_ZEROS,
}
"""Forms whose numbers are kept, with the format in which the kernels read them."""


def load_kept(
    name: str, folder: Path, form: Form, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load a random model in a form with its numbers, and its twin with their values."""
    model = build(name).eval().requires_grad_(False)
    widen(model)
    twin = folder / "twin"
    model.save_pretrained(twin)
    shutil.copytree(twin, folder / "quantized")
    quantize(folder / "quantized", twin, form)
    quantization = QuantizedConfig(rounds=False, keeps=True)
    return (
        load_weights(type(model), folder / "quantized", dtype, "cpu", (), quantization),
        load_weights(type(model), twin, dtype, "cpu"),
    )


@pytest.mark.parametrize("form", KEPT)
def test_layers_keep_the_exact_values_of_a_folder(form: str, tmp_path: Path) -> None:
    kept, twin = load_kept("qwen2_vl", tmp_path, FORMS[form])
    layers = list(quantized_layers(kept))
    assert len(layers) == 3 * 7
    for name, layer in layers:
        assert torch.equal(layer.values(), twin.get_parameter(f"{name}.weight")), name
        assert not layer.is_rounded
    native = NativeModel(adapt(kept), 1)
    assert native.weights.forms["qkv"][0] == KEPT[form]


def test_blocks_of_outputs_share_a_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_checkpoints, "BLOCK", (48, 32))
    form = Form(FP8_BLOCKS | {"weight_block_size": [48, 32]}, fp8_blocks, "")
    kept, twin = load_kept("llama", tmp_path, form)
    for name, layer in quantized_layers(kept):
        assert layer.scale.shape[1] == layer.in_features // 32
        assert torch.equal(layer.values(), twin.get_parameter(f"{name}.weight")), name


@pytest.mark.parametrize("form", ["fp8_blocks", "int8_zeros", "gptq_ordered", "packed_int8"])
def test_other_forms_are_dequantized(form: str, tmp_path: Path) -> None:
    kept, twin = load_kept("llama", tmp_path, FORMS[form])
    assert not list(quantized_layers(kept))
    expected = twin.state_dict()
    for name, weight in kept.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "int8_channels"), ("qwen2_vl", "float_channels"), ("qwen3", "packed_int4")],
)
def test_any_schedule_yields_the_tokens_of_the_twin(name: str, form: str, tmp_path: Path) -> None:
    kept, twin = load_kept(name, tmp_path, FORMS[form])
    whole = adapt(twin)
    tower = None if whole.tower is None else Tower(whole.tower, twin)
    twins = Twins(twin, NativeModel(adapt(kept), 2), tower)
    cases = make_cases(twins.sees)
    schedule = RandomSchedule(random.Random(0), 64, 8, 13, 0.05)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)


class KeptPair(Pair):
    """The twin on torch next to the kept numbers on the kernels."""

    def __init__(self, twin: PreTrainedModel, kept: PreTrainedModel) -> None:
        super().__init__(twin)
        native = NativeModel(adapt(kept), 2)
        self._sides[1] = (native, native.new_cache(64, 8))


@pytest.mark.parametrize("form", KEPT)
def test_logits_equal_the_twin(form: str, tmp_path: Path) -> None:
    kept, twin = load_kept("llama", tmp_path, FORMS[form])
    pair = KeptPair(twin, kept)
    for lengths in STEPS:
        torch.testing.assert_close(*pair.step(lengths), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["int8_channels", "packed_int4_zeros"])
def test_bfloat16_is_as_near_to_float32_as_the_twin_is(form: str, tmp_path: Path) -> None:
    kept, rounded = load_kept("llama", tmp_path, FORMS[form], torch.bfloat16)
    twin = load_weights(type(rounded), tmp_path / "twin", torch.float32, "cpu")
    pair, exact = KeptPair(rounded, kept), Pair(twin)
    for lengths in STEPS:
        truth, _ = exact.step(lengths)
        theirs, ours = ((logits - truth).square().mean() for logits in pair.step(lengths))
        assert ours < 1.5 * theirs


def test_a_matrix_of_several_forms_has_full_weights(tmp_path: Path) -> None:
    """A format may exclude one of the projections that the kernels multiply together."""
    kept, twin = load_kept("llama", tmp_path, FORMS["int8_channels"])
    name = "model.layers.1.self_attn.k_proj"
    kept.set_submodule(name, copy.deepcopy(twin.get_submodule(name)))
    pair = KeptPair(twin, kept)
    for lengths in STEPS:
        torch.testing.assert_close(*pair.step(lengths), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", KEPT)
def test_a_layer_on_torch_computes_the_product_with_its_values(form: str, tmp_path: Path) -> None:
    kept, _ = load_kept("llama", tmp_path, FORMS[form])
    layer = kept.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, QuantizedLinear)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3 * 2**-8)):
        for num_rows in (1, 40):
            x = torch.randn(num_rows, layer.in_features, dtype=dtype)
            expected = x.double() @ layer.values().double().T
            error = (layer(x).double() - expected).abs()
            assert bool((error < tolerance * (expected.abs() + expected.std())).all())


def test_the_loader_keeps_numbers_only_for_the_kernels(tmp_path: Path) -> None:
    folder, _ = copy_quantized(DEMO_MODEL, tmp_path, FORMS["int8_channels"])
    model = ModelConfig(str(folder), dtype="bfloat16")
    kept = load(model, EngineConfig(num_blocks=512)).model
    full = load(ModelConfig(str(DEMO_MODEL), dtype="bfloat16"), EngineConfig(num_blocks=512)).model
    assert isinstance(kept, NativeModel)
    assert isinstance(full, NativeModel)
    assert kept.weights.forms["down"][0] == Format.INT8
    head_bytes = kept.vocab_size * kept.family.decoder.config.hidden_size * 2
    assert kept.weights.num_bytes - head_bytes < 0.55 * (full.weights.num_bytes - head_bytes)
    on_torch = load(model, EngineConfig(num_blocks=512, kernels="torch")).model
    assert isinstance(on_torch, FlatModel)
    assert not list(quantized_layers(on_torch.family.model))


def test_int8_keeps_numbers_and_rounds_the_rest(tmp_path: Path) -> None:
    folder, _ = copy_quantized(DEMO_MODEL, tmp_path, FORMS["awq"])
    model = ModelConfig(str(folder), quantization="int8")
    kept = load(model, EngineConfig(num_blocks=512)).model
    assert isinstance(kept, NativeModel)
    assert kept.weights.forms["down"][0] == Format.INT4_ZEROS
    rounded = load(ModelConfig(str(DEMO_MODEL), quantization="int8"), EngineConfig(num_blocks=512))
    assert isinstance(rounded.model, NativeModel)
    assert rounded.model.weights.forms["down"][0] == Format.INT8
