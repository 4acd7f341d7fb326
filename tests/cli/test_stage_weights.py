"""Planned memory of weights, compared with the weights that the processes of stages load."""

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shared.models import registry
from shared.vision.weights import load_weights
from tests import omni
from tests.quantized_checkpoints import FORMS, copy_quantized
from workers.cli.models.memory import Weights
from workers.cli.models.reports import Report
from workers.cli.models.stage_weights import count_weights
from workers.engine.model import talkers
from workers.engine.model.check_folders import examine
from workers.engine.model.quantizer import QuantizedConfig
from workers.generator import code2wav, token2wav
from workers.settings import DEMO_MODEL

WRITERS = {"qwen3": omni.write_qwen3, "qwen2.5": omni.write_qwen25}


def report_on(folder: Path) -> Report:
    report = msgspec.convert(examine(folder), Report, from_attributes=True)
    assert report.reason is None
    return report


def num_values(modules: Iterable[nn.Module]) -> int:
    weights = {weight for module in modules for weight in module.parameters()}
    return sum(weight.numel() for weight in weights)


@pytest.fixture(scope="module", params=WRITERS)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    WRITERS[request.param](folder)
    return folder


def load_stage(folder: Path, stage: str) -> list[nn.Module]:
    """Return the modules that a process of a stage has in memory."""
    config: Any = AutoConfig.from_pretrained(folder)
    if stage == "engine":
        kind = registry.find_model_class(config)
        return [load_weights(kind, folder, torch.float32, "cpu")]
    if stage == "code2wav" and hasattr(config, "code2wav_config"):
        return [code2wav.load(folder, config, torch.float32, "cpu")._model]  # type: ignore[attr-defined]
    if stage == "code2wav":
        vocoder: Any = token2wav.load(folder, config, omni.VOICES, torch.float32, "cpu")
        return [vocoder._dit, vocoder._bigvgan]
    load = talkers.find_talker(folder)
    assert load is not None
    talker: Any = load(torch.float32, "cpu", "tower")
    return (
        [talker.model, talker._embed_text, talker.thinker._family.model]
        if hasattr(talker, "_embed_text")
        else [talker.model, talker.thinker._family.model]
    )


@pytest.mark.parametrize("stage", ["engine", "talker", "code2wav"])
def test_each_stage_of_an_omni_model_is_planned_with_its_own_weights(
    speaker: Path, stage: str
) -> None:
    planned = count_weights(speaker, report_on(speaker))
    assert planned.keys() == {"engine", "talker", "code2wav"}
    # The norm after the last layer is read, and dropped.
    spare = omni.TEXT["hidden_size"] if stage == "talker" else 0
    loaded = num_values(load_stage(speaker, stage))
    assert loaded <= planned[stage].num_values <= loaded + spare
    assert planned[stage] == Weights(planned[stage].num_values)


# Forms of one layout count alike.
ALWAYS = {("fp8_blocks", True), ("int8_zeros", True), ("awq", True), ("packed_mxfp4", True)}
ALWAYS |= {("fp8_blocks", False), ("packed_int4", False)}


@pytest.mark.parametrize(
    ("form", "keeps"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.long)
        for case in itertools.product(FORMS, (False, True))
    ],
)
def test_quantized_weights_are_planned_as_the_engine_loads_them(
    form: str, keeps: bool, tmp_path: Path
) -> None:
    folder, _ = copy_quantized(DEMO_MODEL, tmp_path, FORMS[form])
    planned = count_weights(folder, report_on(folder), keeps=keeps)["engine"]
    kind = registry.find_model_class(AutoConfig.from_pretrained(folder))
    loaded = load_weights(
        kind, folder, torch.bfloat16, "cpu", (), QuantizedConfig(rounds=False, keeps=keeps)
    )
    weights = {*loaded.parameters(), *(b for n, b in loaded.named_buffers() if _is_stored(n))}
    num_bytes = sum(weight.nbytes for weight in weights)
    assert num_bytes <= planned.num_bytes("bfloat16") <= 1.005 * num_bytes


def _is_stored(name: str) -> bool:
    return name.endswith((".weight", ".scale", ".zero"))


def test_other_files_of_a_folder_are_not_counted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("training"))
    planned = count_weights(folder, report_on(folder))
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert count_weights(folder, report_on(folder)) == planned
