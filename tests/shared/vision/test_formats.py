"""Folders in each quantized format: values, tokens, and contradictions that end the start."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.vision import dequantize
from shared.vision.quantized import find_quantization, read_quantized, read_shapes
from shared.vision.weights import load_weights
from tests.engine.model.test_parity import (
    Twins,
    build,
    folder,
    make_cases,
    reference_answer,
    run_core,
    widen,
)
from tests.quantized_checkpoints import (
    FORMS,
    FP8_BLOCKS,
    WEIGHTS,
    Form,
    Stored,
    compressed,
    copy_quantized,
    fp8_blocks,
    mxfp4_experts,
    quantize,
    read_file,
    set_settings,
    write_file,
)
from workers.engine.loader import load
from workers.engine.model.check_folders import examine
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.int8 import quantized_layers
from workers.engine.model.quantizer import QuantizedConfig
from workers.settings import DEMO_MODEL

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


def write(model: PreTrainedModel, folder: Path, form: Form) -> tuple[Path, Path, list[str]]:
    """Write a model in a form, and its float twin. Return both folders and the weights' names."""
    quantized, twin = folder / "quantized", folder / "twin"
    model.eval().requires_grad_(requires_grad=False)
    widen(model)
    model.save_pretrained(twin)
    shutil.copytree(twin, quantized)
    return quantized, twin, quantize(quantized, twin, form)


@pytest.mark.parametrize(
    ("form", "family"),
    [
        *((form, "llama") for form in FORMS),
        *(
            pytest.param(form, "qwen2_vl", marks=() if form == "awq" else pytest.mark.long)
            for form in FORMS
        ),
    ],
)
def test_a_folder_has_the_values_and_tokens_of_its_float_twin(
    form: str, family: str, tmp_path: Path
) -> None:
    model = build(family)
    folder, twin_folder, names = write(model, tmp_path, FORMS[form])
    assert len(names) == 3 * 7
    served = load_weights(type(model), folder, torch.float32, "cpu")
    twin = load_weights(type(model), twin_folder, torch.float32, "cpu")
    expected = twin.state_dict()
    assert served.state_dict().keys() == expected.keys()
    for name, weight in served.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    adapter = adapt(served)
    tower = None if adapter.tower is None else Tower(adapter.tower, adapter.model)
    twins = Twins(twin, FlatModel(adapter), tower)
    cases = make_cases(twins.sees)
    answers, _ = run_core(twins, cases, num_blocks=64, budget=13, steps_between=1)
    expected_answers = {case.request.request_id: reference_answer(twin, case) for case in cases}
    assert answers == expected_answers
    # Weights of 4 bits or less make some answers repeat a few tokens.
    assert len({token for answer in answers.values() for token in answer}) > 5


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.long),
        pytest.param(torch.float64, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_values_are_rounded_once_to_the_served_type(
    form: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each weight is computed in several parts.
    monkeypatch.setattr(dequantize, "CHUNK_LEN", 64 * dequantize.MAX_PACKED)
    model = build("llama")
    folder, twin, names = write(model, tmp_path, FORMS[form])
    served = load_weights(type(model), folder, dtype, "cpu").state_dict()
    meant = read_file(twin / WEIGHTS)
    for name in names:
        values = torch.from_numpy(meant[name][1].copy())
        # The product of a float64 keeps more bits than the twin, which is written in float32.
        exact = served[name].float() if dtype == torch.float64 else served[name]
        assert torch.equal(exact, values if dtype == torch.float64 else values.to(dtype)), name


@pytest.mark.parametrize("form", ["fp8_blocks", "awq"])
def test_int8_rounds_the_values_of_a_quantized_folder(form: str, tmp_path: Path) -> None:
    model = build("llama")
    folder, twin, _ = write(model, tmp_path, FORMS[form])

    def load_int8(path: Path) -> dict[str, torch.Tensor]:
        quantization = QuantizedConfig(rounds=True, keeps=False)
        loaded = load_weights(type(model), path, torch.float32, "cpu", (), quantization)
        assert len(list(quantized_layers(loaded))) == 3 * 7
        return loaded.state_dict()

    expected = load_int8(twin)
    for name, weight in load_int8(folder).items():
        assert torch.equal(weight, expected[name]), name


def test_stacked_experts_have_scales_for_each_expert(tmp_path: Path) -> None:
    model = build("qwen3_vl_moe")
    form = Form(FP8_BLOCKS, fp8_blocks, "", ending="_proj")
    folder, twin, names = write(model, tmp_path, form)
    assert sum(name.endswith("experts.gate_up_proj") for name in names) == 3
    served = load_weights(type(model), folder, torch.float32, "cpu").state_dict()
    expected = load_weights(type(model), twin, torch.float32, "cpu").state_dict()
    for name, weight in served.items():
        assert torch.equal(weight, expected[name]), name


def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path: Path) -> None:
    config = GptOssConfig(
        num_hidden_layers=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=96,
        hidden_size=64,
        intermediate_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    form = Form(settings, mxfp4_experts, "MXFP4, groups of 32", ending="_proj")
    folder, twin, names = write(GptOssForCausalLM(config), tmp_path, form)
    assert len(names) == 2
    served = load_weights(GptOssForCausalLM, folder, torch.bfloat16, "cpu").state_dict()
    expected = load_weights(GptOssForCausalLM, twin, torch.bfloat16, "cpu").state_dict()
    for name, weight in served.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_the_report_names_the_format_and_counts_parameters(form: str, tmp_path: Path) -> None:
    folder, twin, _ = write(build("llama"), tmp_path, FORMS[form])
    report = examine(folder)
    assert (report.reason, report.stored_as) == (None, FORMS[form].label)
    assert dict(read_shapes(folder)) == dict(read_shapes(twin))
    assert examine(twin).stored_as is None


@pytest.mark.parametrize("form", ["fp8_blocks", "packed_int4_zeros", "gptq"])
@pytest.mark.parametrize("sees", [False, True])
def test_the_engine_serves_a_quantized_folder(
    form: str, sees: bool, folder: Path, tmp_path: Path
) -> None:
    source = DEMO_MODEL if sees else folder
    folder, twin = copy_quantized(source, tmp_path, FORMS[form])
    engine = EngineConfig(num_blocks=512, kernels="torch")
    served, expected = (load(ModelConfig(str(path)), engine).model for path in (folder, twin))
    states = [model.family.model.state_dict() for model in (served, expected)]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_scales_may_be_in_another_file_than_their_numbers(tmp_path: Path) -> None:
    model = build("llama")
    folder, twin, _ = write(model, tmp_path, FORMS["fp8_blocks"])
    tensors = read_raw(folder / WEIGHTS)
    shards = [
        {name: t for name, t in tensors.items() if name.endswith("_scale_inv") is is_scale}
        for is_scale in (False, True)
    ]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_file(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    served = load_weights(type(model), folder, torch.float32, "cpu").state_dict()
    expected = load_weights(type(model), twin, torch.float32, "cpu").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in served.items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    quantized = read_quantized(folder)
    assert quantized is not None
    assert quantized.weights == []


def test_a_quantized_file_of_another_program_is_read_over(tmp_path: Path) -> None:
    model = build("llama")
    folder, twin, _ = write(model, tmp_path, FORMS["fp8_tensor"])
    shutil.copy(folder / WEIGHTS, twin / "consolidated.safetensors")
    report = examine(twin)
    assert (report.reason, report.stored_as) == (None, None)
    load_weights(type(model), twin, torch.float32, "cpu")


@pytest.mark.parametrize("form", ["fp8_blocks", "awq", "gptq", "packed_int4", "packed_mxfp4"])
def test_a_truncated_quantized_file_is_named(form: str, tmp_path: Path) -> None:
    model = build("llama")
    folder, _, _ = write(model, tmp_path, FORMS[form])
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])
    reason = examine(folder).reason or ""
    assert reason.startswith(f"{WEIGHTS} is not a safetensors file: ")
    assert "of data" in reason
    with pytest.raises(ConfigError, match=f"{WEIGHTS} is not a safetensors file"):
        load_weights(type(model), folder, torch.float32, "cpu")


def read_raw(file: Path) -> dict[str, Stored]:
    """Read the tensors of a file as bytes of their types."""
    sizes: dict[str, Any] = {"F32": np.float32, "F8_E4M3": np.uint8, "F16": np.float16}
    sizes |= {"I8": np.int8, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "BF16": np.uint16}
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            first, end = (8 + length + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[first:end], sizes[entry["dtype"]])
            tensors[name] = (entry["dtype"], values.reshape(entry["shape"]))
    return tensors


# -- contradictions -------------------------------------------------------------------------------

OWNER = "model.layers.1.mlp.up_proj"
Change = Callable[[dict[str, Stored]], Any]


def removed(ending: str) -> Change:
    return lambda tensors: tensors.pop(f"{OWNER}.{ending}")


def cut(ending: str) -> Change:
    """Remove the last row of a tensor."""

    def change(tensors: dict[str, Stored]) -> None:
        dtype, values = tensors[f"{OWNER}.{ending}"]
        tensors[f"{OWNER}.{ending}"] = (dtype, values[:-1])

    return change


def stored(ending: str, dtype: str, values: Any) -> Change:
    return lambda tensors: tensors.update({f"{OWNER}.{ending}": (dtype, np.asarray(values))})


def stored_as(ending: str, dtype: str) -> Change:
    """Change the type of a tensor to one whose elements have the same size."""

    def change(tensors: dict[str, Stored]) -> None:
        tensors[f"{OWNER}.{ending}"] = (dtype, tensors[f"{OWNER}.{ending}"][1])

    return change


FLOAT = np.ones((96, 64), np.float32)
GROUPS_OF_16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("fp8_blocks", removed("weight_scale_inv"), "{0}.weight has no weight_scale_inv"),
        ("fbgemm", removed("weight_scale"), "{0}.weight has no weight_scale"),
        ("awq", removed("qzeros"), "{0}.qweight has no qzeros"),
        ("gptq_ordered", removed("g_idx"), "{0}.qweight has no g_idx"),
        ("packed_int4", removed("weight_scale"), "{0}.weight_packed has no weight_scale"),
        ("packed_int4_zeros", removed("weight_zero_point"), "has no weight_zero_point"),
        ("fp8_blocks", cut("weight_scale_inv"), "{0}.weight_scale_inv has the shape [1, 2]"),
        ("int8_channels", cut("weight_scale"), "{0}.weight_scale has the shape [95, 1]"),
        ("awq", cut("scales"), "{0}.scales has the shape [1, 96]"),
        ("gptq", cut("qzeros"), "{0}.qzeros has the shape [1, 12]"),
        ("gptq", cut("g_idx"), "{0}.g_idx has the shape [63]"),
        ("packed_int4_zeros", cut("weight_zero_point"), "weight_zero_point has the shape [11, 2]"),
        ("fbgemm", stored_as("weight_scale", "I32"), "{0}.weight_scale has the type I32"),
        ("awq", stored_as("scales", "I16"), "{0}.scales has the type I16"),
        ("packed_mxfp4", stored_as("weight_scale", "I8"), "{0}.weight_scale has the type I8"),
        ("fp8_blocks", stored_as("weight", "F8_E5M2"), "{0}.weight belongs to no quantized"),
        ("fp8_blocks", stored_as("weight", "I8"), "{0}.weight belongs to no quantized"),
        ("fp8_blocks", stored("weight", "F32", FLOAT), "{0}.weight_scale_inv belongs to no"),
        ("packed_int4", stored_as("weight_packed", "F32"), "{0}.weight_packed belongs to no"),
        ("int8_channels", stored_as("weight", "F8_E4M3"), "{0}.weight has the type F8_E4M3"),
        ("awq", stored("weight", "F32", FLOAT), "{0}.weight is stored twice, also as {0}.qweight"),
    ],
)
def test_a_tensor_that_does_not_fit_its_format_is_named(
    form: str, change: Change, reason: str, tmp_path: Path
) -> None:
    folder, _, _ = write(build("llama"), tmp_path, FORMS[form])
    tensors = read_raw(folder / WEIGHTS)
    change(tensors)
    write_file(folder / WEIGHTS, tensors)
    assert_refused(folder, reason)


def assert_refused(folder: Path, reason: str) -> None:
    """Assert that commands and the engine refuse a folder, in one line that has the reason."""
    reported = examine(folder).reason
    with pytest.raises(ConfigError) as refused:
        load_weights(type(build("llama")), folder, torch.float32, "cpu")
    for message in (find_quantization(folder), reported, refused.value.message):
        assert message is not None
        assert reason.format(OWNER) in message
        assert "\n" not in message
    assert refused.value.field == "models.path"
    assert str(folder) in refused.value.message


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("fp8_blocks", {"weight_block_size": [16, 16]}, ".weight_scale_inv has the shape [2, 3]"),
        ("fp8_blocks", {"weight_block_size": None}, ".weight_scale_inv has the shape [2, 3]"),
        ("fp8_tensor", {"weight_block_size": [48, 40]}, ".weight_scale has the shape []"),
        ("fp8_blocks", {"weight_block_size": [0, 16]}, "a block of 0 x 16"),
        ("fp8_blocks", {"fmt": "e5m2"}, "'e5m2' is not one of the possible values"),
        ("awq", {"group_size": 16}, ".scales has the shape [3, 64]"),
        ("awq", {"bits": 8}, "8 is not one of the possible values"),
        ("awq", {"version": "gemv"}, "the version 'gemv' is not supported"),
        ("gptq", {"group_size": -1}, ".scales has the shape [3, 64]"),
        ("gptq", {"bits": 8}, ".scales has the shape"),
        ("gptq", {"bits": 3}, "3 is not one of the possible values"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin' is not one of the possible values"),
        ("gptq", {"dynamic": {r"+:.*up": {"bits": 8}}}, "the setting dynamic has '+:.*up'"),
        ("gptq", {"dynamic": {r"-:.*up_proj": {}}}, "up_proj.qweight is quantized, but"),
        ("modelopt", {"quant_algo": "NVFP4"}, "'NVFP4' is not one of the possible values"),
        ("modelopt", {"ignore": ["model.layers.1*"]}, "layers.1.mlp.down_proj.weight is quantized"),
        ("fp8_blocks", {"modules_to_not_convert": ["mlp.up_proj"]}, "up_proj.weight is quantized"),
        ("int8_channels", {"ignore": [r"re:.*\.1\.mlp\.up.*"]}, "{0}.weight is quantized"),
        ("int8_channels", {"ignore": ["re:("]}, "the module 're:(' in the settings is no pattern"),
        ("int8_channels", {"format": "pack-quantized"}, ".weight has the type I8, but"),
        ("int8_channels", {"format": "marlin-24"}, "the format 'marlin-24' with the type 'int'"),
        ("int8_channels", {"config_groups": {}}, "belongs to 0 groups of the settings"),
        ("int8_channels", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ("int8_channels", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (
            "packed_int4",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": GROUPS_OF_16}}},
            ".weight_scale has the shape [64, 3]",
        ),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(
    form: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder, _, _ = write(build("llama"), tmp_path, FORMS[form])
    set_settings(folder, replace(FORMS[form], settings=FORMS[form].settings | changes))
    assert_refused(folder, reason)


@pytest.mark.parametrize("pattern", ["proj", "up", "layers.1.mlp.u", "lm_head", "re:.*gate$"])
def test_excluded_modules_are_matched_by_whole_parts_of_their_names(
    pattern: str, tmp_path: Path
) -> None:
    folder, _, _ = write(build("llama"), tmp_path, FORMS["fp8_blocks"])
    settings = FP8_BLOCKS | {"modules_to_not_convert": [pattern]}
    set_settings(folder, replace(FORMS["fp8_blocks"], settings=settings))
    assert find_quantization(folder) is None


def test_two_settings_must_name_one_format(tmp_path: Path) -> None:
    folder, _, _ = write(build("llama"), tmp_path, FORMS["modelopt"])
    set_settings(folder, FORMS["modelopt_file"])
    assert find_quantization(folder) is None
    set_settings(folder, FORMS["awq"])
    assert_refused(folder, "these settings name different formats")


@pytest.mark.parametrize(
    ("form", "file"), [("awq", "quant_config.json"), ("gptq", "quantize_config.json")]
)
def test_a_copy_of_the_settings_in_a_file_is_ignored(form: str, file: str, tmp_path: Path) -> None:
    folder, _, _ = write(build("llama"), tmp_path, FORMS[form])
    (folder / file).write_text("{}")
    assert find_quantization(folder) is None


def test_each_scheme_holds_for_the_modules_that_it_targets(tmp_path: Path) -> None:
    model = build("llama")
    settings = compressed("mixed-precision")
    schemes = {
        "down": ("pack-quantized", ["re:.*down_proj"], "packed_int4"),
        "rest": ("float-quantized", ["Linear"], "float_channels"),
    }
    settings["config_groups"] = {
        name: {
            "format": form,
            "targets": targets,
            "weights": FORMS[source].settings["config_groups"]["group_0"]["weights"],
        }
        for name, (form, targets, source) in schemes.items()
    }

    def write_by_name(name: str, weight: Any) -> Any:
        source = "packed_int4" if "down_proj" in name else "float_channels"
        return FORMS[source].write(name, weight)

    folder, twin, _ = write(model, tmp_path, Form(settings, write_by_name, ""))
    label = "int4, groups of 32 and FP8, one scale per channel (compressed-tensors)"
    assert examine(folder).stored_as == label
    served = load_weights(type(model), folder, torch.float32, "cpu").state_dict()
    expected = load_weights(type(model), twin, torch.float32, "cpu").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in served.items())


@pytest.mark.parametrize("form", ["fp8_blocks", "awq", "packed_int4", "gptq"])
def test_settings_without_quantized_tensors_are_refused(form: str, tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    set_settings(tmp_path, FORMS[form])
    assert_refused(tmp_path, "that cannot be read: no tensor is quantized")


# -- contradictions that are found while the weights are read -------------------------------------


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        (
            "packed_int4",
            stored("weight_shape", "I64", np.array([96, 60])),
            "{0}.weight_shape is [96, 60], but {0}.weight_packed has the numbers of [96, 64]",
        ),
        (
            "gptq_ordered",
            stored("g_idx", "I32", np.full(64, 2, np.int32)),
            "{0}.g_idx names the group 2, but there are 2 groups",
        ),
        (
            "gptq",
            stored("g_idx", "I32", np.arange(64, dtype=np.int32) % 2),
            "{0}.g_idx orders the inputs, but desc_act is false",
        ),
        (
            "fp8_blocks",
            stored("weight_scale_inv", "F32", np.full((2, 2), np.inf, np.float32)),
            "{0}.weight has values that are not finite",
        ),
        (
            "fbgemm",
            stored("weight", "F8_E4M3", np.full((96, 64), 127, np.uint8)),
            "{0}.weight has values that are not finite",
        ),
        (
            "packed_mxfp4",
            stored("weight_scale", "U8", np.full((96, 2), 255, np.uint8)),
            "{0}.weight has values that are not finite",
        ),
    ],
)
def test_contents_that_contradict_the_format_end_the_start(
    form: str, change: Change, reason: str, tmp_path: Path
) -> None:
    model = build("llama")
    folder, _, _ = write(model, tmp_path, FORMS[form])
    tensors = read_raw(folder / WEIGHTS)
    change(tensors)
    write_file(folder / WEIGHTS, tensors)
    assert_load_refused(model, folder, reason)


def assert_load_refused(model: PreTrainedModel, folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_weights(type(model), folder, torch.float32, "cpu")
    assert reason.format(OWNER) in refused.value.message
    assert str(folder) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_matrix_of_another_size_is_refused_with_both_shapes(tmp_path: Path) -> None:
    model = build("llama")
    folder, _, _ = write(model, tmp_path, FORMS["int8_channels"])
    tensors = read_raw(folder / WEIGHTS)
    for name in (f"{OWNER}.weight", f"{OWNER}.weight_scale"):
        tensors[name] = (tensors[name][0], tensors[name][1][:-1])
    write_file(folder / WEIGHTS, tensors)
    reason = "has {0}.weight of shape [95, 64], but config.json requires [96, 64]"
    assert_load_refused(model, folder, reason)


def test_a_fused_matrix_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    folder, _, _ = write(model, tmp_path, FORMS["awq"])
    tensors = read_raw(folder / WEIGHTS)
    for name in [name for name in tensors if OWNER in name]:
        tensors[name.replace("up_proj", "gate_up_proj")] = tensors.pop(name)
    write_file(folder / WEIGHTS, tensors)
    reason = "no weight of the model is named model.layers.1.mlp.gate_up_proj.weight"
    assert_load_refused(model, folder, reason)


def test_a_quantized_head_that_is_tied_to_the_embeddings_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    form = replace(FORMS["fp8_tensor"], others={"tie_word_embeddings": True})
    folder, _, _ = write(model, tmp_path, form)
    tensors = read_raw(folder / WEIGHTS)
    head, _ = form.write("lm_head.weight", tensors.pop("lm_head.weight")[1])
    write_file(folder / WEIGHTS, tensors | head)
    reason = "has a quantized lm_head.weight, but config.json ties it to model.embed_tokens.weight"
    assert_load_refused(model, folder, reason)


# -- weights that other programs wrote ------------------------------------------------------------

RECORDED = Path(__file__).parents[2] / "recorded" / "quantized_weights.safetensors"
"""A matrix as AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and compressed-tensors 0.20.0 write it, and the values
that these programs compute from it."""


def recorded_forms() -> dict[str, dict[str, Any]]:
    with safe_open(RECORDED, framework="np") as file:
        forms: dict[str, dict[str, Any]] = json.loads(file.metadata()["settings"])
    return forms


@pytest.mark.parametrize("form", recorded_forms())
def test_weights_of_other_programs_have_the_values_that_these_compute(
    form: str, tmp_path: Path
) -> None:
    recorded = load_file(RECORDED)
    values = recorded[f"{form}.values"]
    own = {
        name.removeprefix(f"{form}."): tensor
        for name, tensor in recorded.items()
        if name.startswith(f"{form}.m.")
    }
    save_file(own, tmp_path / WEIGHTS)
    config = {"quantization_config": recorded_forms()[form]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantized = read_quantized(tmp_path)
    assert quantized is not None
    weights = dequantize.open_weights(tmp_path, quantized, values.dtype)
    assert list(weights) == ["m.weight"]
    assert torch.equal(weights["m.weight"][...], values)
