"""Pooling in the files that sentence-transformers stores with a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.protocol.requests import EmbeddingParams
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import LAST_TOKEN, EngineRequest, Pooling
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.engine.pooling_files import read_pooling
from workers.settings import DEMO_MODEL

STEPS = "sentence_transformers.models"


def write(folder: Path, pooling: Any = None, steps: list[str] | None = None) -> Path:
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if steps is not None:
        paths = {"Transformer": "", "Pooling": "1_Pooling"}
        modules = [
            {"idx": i, "name": str(i), "path": paths.get(name, f"{i}_{name}"), "type": name_of}
            for i, (name, name_of) in enumerate((name, f"{STEPS}.{name}") for name in steps)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def modes(*names: str) -> dict[str, Any]:
    all_modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    flags = {f"pooling_mode_{name}": name in names for name in all_modes}
    return {"word_embedding_dimension": 64, "include_prompt": True} | flags


WHOLE = ["Transformer", "Pooling", "Normalize"]


@pytest.mark.parametrize(
    ("pooling", "steps", "expected"),
    [
        (None, None, LAST_TOKEN),
        (modes("lasttoken"), None, LAST_TOKEN),
        (modes("mean_tokens"), None, Pooling("mean")),
        (modes("mean_tokens"), WHOLE, Pooling("mean")),
        (modes("mean_tokens"), WHOLE[:2], Pooling("mean", normalize=False)),
        (modes("lasttoken"), WHOLE[:2], Pooling("last", normalize=False)),
        ({"pooling_mode": "mean"}, WHOLE, Pooling("mean")),
        ({"pooling_mode": ["lasttoken"]}, WHOLE, LAST_TOKEN),
        (None, WHOLE[:1], Pooling("last", normalize=False)),
    ],
)
def test_the_files_name_the_pooling(
    tmp_path: Path, pooling: Any, steps: list[str] | None, expected: Pooling
) -> None:
    assert read_pooling(write(tmp_path, pooling, steps), None) == expected


def test_the_pooling_of_another_folder_is_found(tmp_path: Path) -> None:
    write(tmp_path, modes("mean_tokens"), WHOLE)
    (tmp_path / "1_Pooling").rename(tmp_path / "pooled")
    modules = (tmp_path / "modules.json").read_text().replace("1_Pooling", "pooled")
    (tmp_path / "modules.json").write_text(modules)
    assert read_pooling(tmp_path, None) == Pooling("mean")


@pytest.mark.parametrize(
    ("pooling", "key"),
    [
        (modes("cls_token"), "pooling_mode_cls_token"),
        (modes("max_tokens"), "pooling_mode_max_tokens"),
        (modes("mean_sqrt_len_tokens"), "pooling_mode_mean_sqrt_len_tokens"),
        (modes("mean_tokens", "lasttoken"), "pooling_mode_mean_tokens"),
        (modes(), "pooling_mode"),
        ({"pooling_mode": "cls"}, "pooling_mode"),
        ({"pooling_mode": 5}, "pooling_mode"),
        ({"pooling_mode": {"mean": True}}, "pooling_mode"),
        ({"pooling_mode": ["mean", []]}, "pooling_mode"),
    ],
)
def test_other_modes_are_refused_by_file_and_key(tmp_path: Path, pooling: Any, key: str) -> None:
    folder = write(tmp_path, pooling, WHOLE)
    with pytest.raises(ConfigError, match=rf"1_Pooling/config.json: {key}: "):
        read_pooling(folder, None)
    assert read_pooling(folder, "mean") == Pooling("mean")
    assert read_pooling(folder, "last") == LAST_TOKEN


def test_steps_that_the_engine_does_not_run_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, modes("mean_tokens"), ["Transformer", "Pooling", "Dense"])
    with pytest.raises(ConfigError, match=r"modules.json: \[2\].type: Dense is not supported"):
        read_pooling(folder, "mean")


@pytest.mark.parametrize("path", ["../other", "/tmp", "1_Pooling/../.."])
def test_a_step_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    folder = write(tmp_path, modes("mean_tokens"), WHOLE)
    modules = (folder / "modules.json").read_text().replace("1_Pooling", path)
    (folder / "modules.json").write_text(modules)
    with pytest.raises(ConfigError, match=r"modules.json: \[1\].path: must be within"):
        read_pooling(folder, None)


def test_a_pooling_without_its_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, None, WHOLE)
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json cannot be read"):
        read_pooling(folder, None)
    assert read_pooling(folder, "mean") == Pooling("mean")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": ' + 100_000 * "["])
def test_unreadable_files_are_refused(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, modes("mean_tokens"))
    (folder / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json cannot be read"):
        read_pooling(folder, None)


def demo_folder(folder: Path, *names: str) -> Path:
    """Return a folder of the demo model with these modes of pooling."""
    for file in Path(DEMO_MODEL).iterdir():
        (folder / file.name).symlink_to(file)
    return write(folder, modes(*names), WHOLE[:2])


def test_an_engine_pools_as_its_folder_says(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path, "mean_tokens")
    prompt = [*range(40, 75)]
    engine = EngineConfig(kv_cache_mib=64, kernels="torch", max_num_batched_tokens=16)
    core = build_core(load(ModelConfig(str(folder)), engine), engine)
    core.add(EngineRequest("e", prompt, [], SamplingParams(), embedding=EmbeddingParams()))
    outputs = []
    while core.has_work:
        outputs += core.step()
    reference: Any = AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.no_grad():
        states = reference.eval().model(torch.tensor([prompt])).last_hidden_state[0]
    right = states.double().mean(dim=0).numpy()
    embedding = np.frombuffer(outputs[-1].embedding, "<f4")
    assert np.linalg.norm(embedding - right) <= 1e-5 * np.linalg.norm(right)


def test_an_engine_does_not_start_with_a_pooling_that_it_lacks(tmp_path: Path) -> None:
    folder, engine = (
        demo_folder(tmp_path, "cls_token"),
        EngineConfig(kv_cache_mib=64, kernels="torch"),
    )
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json: pooling_mode_cls_token"):
        load(ModelConfig(str(folder)), engine)
    loaded = load(ModelConfig(str(folder), pooling="mean"), engine)
    assert loaded.pooling == Pooling("mean", normalize=False)
