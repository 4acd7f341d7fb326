"""Folders with quantized weights that no reader claims: each is refused, by settings or tensors."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.tower import load_tower
from shared.protocol.chunks import ChunkSpec
from shared.vision.formats import READERS
from shared.vision.quantized import SETTINGS_FILES, find_quantization
from shared.vision.weights import load_weights
from tests import omni
from tests.engine.model.test_parity import build
from tests.generator import painters
from workers.engine.loader import load
from workers.engine.model import check_folders
from workers.engine.model.talkers import find_talker
from workers.generator.loader import load_vocoder
from workers.generator.painter_model import load_painter
from workers.settings import DEMO_MODEL

WEIGHTS = "model.safetensors"
METHODS = sorted({*AUTO_QUANTIZER_MAPPING, "invented"} - {"pagemill_int8", *READERS})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model, which sees."""
    copied = tmp_path / "copied"
    shutil.copytree(DEMO_MODEL, copied, ignore=shutil.ignore_patterns("training"))
    return copied


def set_config(folder: Path, *path: str, **values: Any) -> None:
    file = folder / "config.json"
    config = section = json.loads(file.read_text())
    for key in path:
        section = section.setdefault(key, {})
    section.update(values)
    file.write_text(json.dumps(config))


def change(folder: Path, name_to_change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Replace each tensor of a folder by those that the function returns for it."""
    file = folder / WEIGHTS
    stored = load_file(file)
    changed = {k: v for name in stored for k, v in name_to_change(name, stored[name]).items()}
    save_file(changed, file, {"format": "pt"})


def refusals(folder: Path) -> Iterator[str]:
    """Yield why the folder is refused: by `up`, `models` and `pull`, the engine, and an encoder."""
    reason = check_folders.examine(folder).reason
    assert reason is not None
    yield reason
    for load_it in (
        lambda: load(ModelConfig(str(folder)), EngineConfig(num_blocks=256, kernels="torch")),
        lambda: load_tower(folder, torch.float32, "cpu"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_it()
        assert refused.value.field == "models.path"
        assert str(folder) in refused.value.message
        yield refused.value.message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_each_quantizer_without_a_reader_is_refused(folder: Path, method: str, key: str) -> None:
    set_config(folder, **{key: {"quant_method": method}})
    for reason in refusals(folder):
        assert f"has quantized weights (config.json has {key} for {method!r})" in reason


@pytest.mark.parametrize("section", ["text_config", "vision_config", "talker_config"])
def test_the_setting_of_a_section_is_refused(folder: Path, section: str) -> None:
    set_config(folder, section, quantization_config={"quant_method": "fp8"})
    for reason in refusals(folder):
        assert f"config.json has {section}.quantization_config for 'fp8'" in reason


@pytest.mark.parametrize("name", sorted(SETTINGS_FILES))
def test_a_file_of_settings_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    for reason in refusals(folder):
        assert f"it has {name}" in reason


def test_a_setting_of_null_says_nothing(folder: Path) -> None:
    set_config(folder, quantization_config=None)
    assert find_quantization(folder) is None
    assert check_folders.examine(folder).reason is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_each_size_are_weights(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda name, weight: {name: weight.to(dtype)})
    assert find_quantization(folder) is None
    load_tower(folder, torch.float32, "cpu")


def float8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}


def int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight.to(torch.int8), f"{name}_scale": torch.ones(len(weight), 1)}


def scaled_float(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight, f"{name}_scale": torch.ones(1)}


def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    owner = name.removesuffix("weight")
    return {
        f"{owner}qweight": weight.to(torch.int32),
        f"{owner}scales": torch.ones(1),
        f"{owner}qzeros": torch.zeros(1, dtype=torch.int32),
    }


def four_bits(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight.flatten()[::2, None].byte(), f"{name}.absmax": torch.ones(1)}


FORMS = [float8, int8, scaled_float, packed, four_bits]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", ["layers.0.mlp.up_proj", "blocks.0.mlp.fc1"])
def test_tensors_without_a_setting_are_refused(
    folder: Path, form: Callable[[str, Tensor], dict[str, Tensor]], part: str
) -> None:
    def change_one(name: str, weight: Tensor) -> dict[str, Tensor]:
        return form(name, weight) if name.endswith(f"{part}.weight") else {name: weight}

    change(folder, change_one)
    for reason in refusals(folder):
        assert "has quantized weights" in reason
        assert part in reason


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e5m2])
def test_integers_of_stacked_experts_are_found_by_the_name_in_the_model(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    stacked = "mlp.experts.gate_up_proj"

    def round_experts(name: str, weight: Tensor) -> dict[str, Tensor]:
        return {name: weight.to(dtype) if name.endswith(stacked) else weight}

    change(tmp_path, round_experts)
    with pytest.raises(ConfigError, match=rf"quantized weights \(\S+{stacked} has the type"):
        load_weights(type(model), tmp_path, torch.float32, "cpu")


def load_llama(folder: Path, name: str, tensor: Tensor) -> PreTrainedModel:
    """Load a Llama with one tensor more in its file."""
    model = build("llama")
    model.save_pretrained(folder)
    change(folder, lambda key, weight: {key: weight, name: tensor})
    return load_weights(type(model), folder, torch.float32, "cpu")


@pytest.mark.parametrize("ending", ["k_scale", "q_zeros", "experts_scales", "o_scale_inv"])
def test_a_scale_that_the_model_does_not_have_is_refused(tmp_path: Path, ending: str) -> None:
    name = f"model.layers.0.self_attn.{ending}"
    with pytest.raises(ConfigError, match=f"no weight of the model is named {name}"):
        load_llama(tmp_path, name, torch.ones(1))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.position_ids", torch.arange(4)),
        ("model.layers.0.self_attn.masked_bias", torch.ones(1, dtype=torch.bool)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)),
        ("vocoder.blocks.0.layer_scale.scale", torch.ones(2)),
        ("vocoder.num_batches_tracked", torch.ones((), dtype=torch.int64)),
    ],
)
def test_integers_and_scales_that_belong_to_no_weight_are_read_over(
    tmp_path: Path, name: str, tensor: Tensor
) -> None:
    load_llama(tmp_path, name, tensor)
    assert find_quantization(tmp_path) is None


# -- parts of a model -----------------------------------------------------------------------------


def load_talker(folder: Path) -> object:
    load_part = find_talker(folder)
    assert load_part is not None
    return load_part(torch.float32, "cpu", "tower")


def load_vocoder_of(folder: Path) -> object:
    return load_vocoder(folder, ChunkSpec(left=100, right=100), "vocoder", voices=omni.VOICES)


def load_thinker(folder: Path) -> object:
    return load(ModelConfig(str(folder)), EngineConfig(num_blocks=4096, kernels="torch"))


PARTS = [("thinker", load_thinker), ("talker", load_talker), ("code2wav", load_vocoder_of)]


@pytest.mark.parametrize(
    ("write", "vocoder"), [(omni.write_qwen3, "code2wav"), (omni.write_qwen25, "token2wav")]
)
def test_each_part_of_an_omni_model_looks_at_its_own_scales(
    tmp_path: Path, write: Callable[[Path], None], vocoder: str
) -> None:
    """An omni model's folder has all parts, and each part has separate scales."""
    whole = tmp_path / "whole"
    write(whole)
    for part, load_it in PARTS:
        load_it(whole)
        folder = tmp_path / part
        shutil.copytree(whole, folder)
        prefix = vocoder if load_it is load_vocoder_of else part

        def scale(name: str, weight: Tensor, prefix: str = prefix) -> dict[str, Tensor]:
            is_own = name.startswith(prefix) and name.endswith(".weight")
            return {name: weight} | ({f"{name}.nested_scale": torch.ones(1)} if is_own else {})

        change(folder, scale)
        assert find_quantization(folder) is None
        with pytest.raises(ConfigError, match=f"no weight of the model is named {prefix}"):
            load_it(folder)


def test_a_quantized_painter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "painter"
    painters.write(folder)
    load_painter(folder, "float32", ["16x16"], "paint")
    change(folder, lambda name, weight: {name: weight.to(torch.int8)})
    with pytest.raises(ConfigError, match=r"paint\.path: .* has quantized weights"):
        load_painter(folder, "float32", ["16x16"], "paint")
