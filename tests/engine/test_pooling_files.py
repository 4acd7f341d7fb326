"""Pooling as sentence-transformers writes it beside a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from workers.engine.core.sequence import LAST_TOKEN, Pooling
from workers.engine.pooling_files import read_pooling

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
    known = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    flags = {f"pooling_mode_{name}": name in names for name in known}
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


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_unreadable_files_are_refused(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, modes("mean_tokens"))
    (folder / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json cannot be read"):
        read_pooling(folder, None)
