"""Weight-only int8: rounding, layers, whole models against transformers, and what is refused."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ops.bench.int8 import compare
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.vision.weights import load_weights
from tests.engine.model.test_parity import (
    DEMO_MODEL,
    Twins,
    answers_of,
    build,
    make_cases,
    run_core,
    widen,
)
from tests.models.test_generic import build as build_generic
from workers.cli.models.reports import Report
from workers.cli.models.stage_weights import count_weights
from workers.engine.loader import load
from workers.engine.model import quantizer
from workers.engine.model.check_folders import examine
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.int8 import (
    FILLED_CHANNELS,
    dequantize,
    fill,
    quantize,
    quantized_layers,
    report_on,
)
from workers.engine.model.quantized_linear import MAX_PACKED_ROWS, QuantizedLinear
from workers.engine.model.quantizer import QuantizedConfig

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    exponent=st.floats(-30, 30),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_no_weight_is_off_by_more_than_half_a_step(
    shape: tuple[int, int], exponent: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 10**exponent).to(dtype)
    weight[0] = 0
    integers, scale = quantize(weight)
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.float32)
    steps = scale.double()
    error = (integers.double() * steps - weight.double()).abs()
    assert bool((error <= steps * 0.5001).all())
    assert not integers[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_inputs", [64, 40], ids=["packed", "odd"])
@pytest.mark.parametrize("num_rows", [1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 300])
def test_a_layer_computes_the_product_with_its_rounded_weights(
    dtype: torch.dtype, has_bias: bool, num_inputs: int, num_rows: int
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(num_inputs, 1111, has_bias, dtype=dtype).requires_grad_(False)
    layer = QuantizedLinear(linear)
    fill(layer, linear.weight)
    hidden = torch.randn(1, num_rows, num_inputs, dtype=dtype)
    weight = dequantize(layer.weight, layer.scale.double())
    bias = None if linear.bias is None else linear.bias.double()
    expected = nn.functional.linear(hidden.double(), weight, bias)
    # A bfloat16 has 8 bits: the sums, their scaling and the bias are each rounded.
    tolerance = 1e-5 if dtype == torch.float32 else 3 * 2**-8
    torch.testing.assert_close(
        layer(hidden).double(), expected, rtol=tolerance, atol=tolerance * 0.5
    )
    assert 0.001 < layer.error < 0.02


def load_int8(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model.save_pretrained(folder)
    quantization = QuantizedConfig(rounds=True, keeps=False)
    return load_weights(type(model), folder, dtype, "cpu", (), quantization)


def with_rounded_weights(model: PreTrainedModel, served: PreTrainedModel) -> PreTrainedModel:
    """Return a copy for transformers, with the weights that the integers of `served` represent."""
    reference = copy.deepcopy(model)
    for name, layer in quantized_layers(served):
        linear: Any = reference.get_submodule(name)
        linear.weight.data = dequantize(layer.weight, layer.scale)
    return reference


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2_vl", "qwen3_vl"])
def test_the_engine_yields_the_tokens_of_transformers_with_rounded_weights(
    name: str, tmp_path: Path
) -> None:
    model = build(name).eval().requires_grad_(False)
    widen(model)
    served = load_int8(model, tmp_path, torch.float32)
    family = adapt(served)
    tower = None if family.tower is None else Tower(family.tower, family.model)
    twins = Twins(with_rounded_weights(model, served), FlatModel(family), tower)
    cases = make_cases(twins.sees)
    answers, _ = run_core(twins, cases, num_blocks=64, budget=13, steps_between=1)
    assert answers == answers_of(twins, cases)


def test_only_linear_layers_of_the_decoder_are_rounded(tmp_path: Path) -> None:
    model = build("qwen2_vl").eval()
    served = load_int8(model, tmp_path, torch.bfloat16)
    names = [name for name, _ in quantized_layers(served)]
    assert len(names) == 3 * 7
    assert all(".layers." in name and "visual" not in name for name in names)
    left = {name for name, tensor in served.named_parameters() if tensor.dtype != torch.bfloat16}
    assert not left
    report = msgspec.convert(examine(tmp_path), Report, from_attributes=True)
    planned = count_weights(tmp_path, report, rounds=True)["engine"]
    assert sum(layer.weight.numel() for _, layer in quantized_layers(served)) == planned.num_rounded


def test_each_full_weight_is_dropped_before_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[weakref.ref[Tensor]] = []

    def watched(layer: QuantizedLinear, weight: Tensor) -> None:
        assert all(earlier() is None for earlier in weights)
        weights.append(weakref.ref(weight))
        fill(layer, weight)

    monkeypatch.setattr(quantizer, "fill", watched)
    model = build("llama").eval()
    served = load_int8(model, tmp_path, torch.float32)
    assert len(weights) == 3 * 7
    saved = sum(3 * layer.weight.numel() for _, layer in quantized_layers(served))
    report = report_on(served)
    assert report is not None
    assert saved == report.saved_bytes > 0


def test_a_weight_is_rounded_in_parts() -> None:
    """Its float32 copies are smaller than the weight, and the result equals rounding it at once."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor) and tensor.dtype != torch.int8:
                    sizes.append(tensor.untyped_storage().nbytes())
            return result

    num_channels, num_inputs = 3 * FILLED_CHANNELS + 7, 32
    linear = nn.Linear(num_inputs, num_channels, dtype=torch.bfloat16).requires_grad_(False)
    weight = linear.weight
    layer = QuantizedLinear(linear)
    with Watch():
        fill(layer, weight)
    # Slices of the weight share its storage.
    assert max(size for size in sizes if size != weight.nbytes) <= FILLED_CHANNELS * num_inputs * 4
    integers, scale = quantize(weight)
    assert layer.weight.equal(integers)
    assert layer.scale.equal(scale)
    exact = weight.double()
    error = (exact - integers.double() * scale.double()).norm() / exact.norm()
    assert layer.error == pytest.approx(float(error), rel=1e-5)


@pytest.mark.parametrize("num_channels", [1, 95])
def test_a_weight_of_another_shape_is_refused(num_channels: int, tmp_path: Path) -> None:
    model, name = build("llama").eval(), "model.layers.0.mlp.up_proj"
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    full = weights[f"{name}.weight"]
    weights[f"{name}.weight"] = full[:num_channels].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    quantization = QuantizedConfig(rounds=True, keeps=False)
    with pytest.raises(ConfigError) as refused:
        load_weights(type(model), tmp_path, torch.float32, "cpu", (), quantization)
    assert refused.value.field == "models.path"
    for words in (f"{name}.weight", str([num_channels, full.shape[1]]), str(list(full.shape))):
        assert words in refused.value.message


def test_the_demo_model_is_reported_and_close_to_its_full_weights() -> None:
    engine = EngineConfig(kv_cache_mib=64, kernels="torch")
    with capture_logs() as events:
        rounded = load(ModelConfig(str(DEMO_MODEL), quantization="int8"), engine)
    (event,) = [event for event in events if event["event"] == "weights_quantized"]
    assert event["num_layers"] == 21
    assert 0.001 < event["mean_weight_error"] <= event["worst_weight_error"] < 0.02
    full = load(ModelConfig(str(DEMO_MODEL)), engine)
    tokens = torch.tensor(full.encode_part("What color is this image? " * 8))
    same_share, divergence, _ = compare(full, rounded, [tokens])
    assert same_share > 0.9
    assert 0 < divergence < 0.02
    assert compare(full, full, [tokens]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("make", "model_type", "reason"),
    [
        (build, "qwen3_vl_moe", "the experts of 'qwen3_vl_moe' are not linear layers"),
        (build_generic, "gpt2", "the layers of 'gpt2' are not linear layers of torch"),
    ],
)
def test_models_without_linear_layers_are_refused(
    make: Callable[[str], PreTrainedModel], model_type: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        load_int8(make(model_type), tmp_path, torch.float32)
    assert refused.value.field == "models.quantization"


@pytest.mark.parametrize("is_stored", [False, True])
def test_quantized_folders_are_refused(tmp_path: Path, is_stored: bool) -> None:
    model, name = build("llama"), "model.layers.0.mlp.up_proj.weight"
    model.save_pretrained(tmp_path)
    if is_stored:
        weights = load_file(tmp_path / "model.safetensors")
        weights[name] = weights[name].to(torch.int8)
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        model.config.quantization_config = {"quant_method": "gptq"}
        model.config.save_pretrained(tmp_path)
    quantization = QuantizedConfig(rounds=True, keeps=False)
    with pytest.raises(ConfigError, match="has quantized weights"):
        load_weights(type(model), tmp_path, torch.float32, "cpu", (), quantization)
