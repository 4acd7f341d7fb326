"""Folders of hybrid models: the report, and the settings that they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.schema import EngineConfig, ModelConfig, SpeculativeConfig
from shared.errors import ConfigError
from tests.cli.test_commands import run
from tests.engine.model.test_self_check import write_folder
from tests.models.test_hybrids import ALWAYS, SPECS
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.engine.model import check_folders
from workers.engine.model.quantized_linear import QuantizedLinear

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    write_folder(path, ALWAYS, **SPECS[ALWAYS])
    return path


def test_a_hybrid_is_served_and_its_states_are_counted(folder: Path) -> None:
    report = check_folders.examine(folder)
    assert (report.family, report.source, report.reason) == (ALWAYS, "generic", None)
    # One of four layers has attention: 2 heads of 16 numbers.
    assert report.kv_values_per_token == 2 * 2 * 16
    # 3 layers: 4 inputs of 2 x 32 + 48 channels, and 4 heads of 16 x 12 numbers.
    assert report.state_bytes_per_sequence == 4 * 3 * (4 * 112 + 4 * 16 * 12)
    engine = EngineConfig(num_blocks=64, max_num_seqs=3)
    loaded = load(ModelConfig(str(folder)), engine)
    assert loaded.model.keeps_states
    assert build_core(loaded, engine).stats().num_blocks == 64


def test_the_linear_layers_of_a_hybrid_become_int8(folder: Path) -> None:
    model = ModelConfig(str(folder), dtype="bfloat16", quantization="int8")
    decoder: Any = load(model, EngineConfig(num_blocks=64)).model.family.decoder
    recurrent = decoder.layers[0].linear_attn
    assert isinstance(recurrent.in_proj_qkv, QuantizedLinear)
    assert recurrent.conv1d.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "engine", "field"),
    [
        ({"adapters": {"tuned": "adapters/tuned"}}, {}, "models.NAME.adapters"),
        ({"prefill": "prefill"}, {}, "models.NAME.prefill"),
        ({}, {"kv_events": True}, "engine.kv_events"),
        (
            {},
            {"speculative": SpeculativeConfig(num_tokens=4)},
            "engine.speculative.num_tokens",
        ),
    ],
)
def test_settings_that_do_not_work_with_states_are_refused(
    folder: Path, model: dict[str, Any], engine: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=r"hybrid model.*: (remove|set)") as caught:
        load(ModelConfig(str(folder), **model), EngineConfig(**engine))
    assert caught.value.field == field


def test_check_names_a_setting_that_a_hybrid_refuses(folder: Path, tmp_path: Path) -> None:
    text = "models: {v1.5: {path: FOLDER, prefill: prefill}}\n"
    (tmp_path / "pagemill.yaml").write_text(text.replace("FOLDER", str(folder)))
    done = run("check", cwd=tmp_path)
    assert done.returncode != 0
    assert "models.v1.5.prefill: a hybrid model has states" in done.stderr.replace("\n", " ")
