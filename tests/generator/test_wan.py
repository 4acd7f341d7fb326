"""Variants of Wan, compared with diffusers as in `test_pipelines`, and their settings."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ConfigError
from shared.models.image_folder import list_missing_files, read_image_folder
from tests.generator.pipelines import wan
from tests.generator.test_pipelines import KEY, Canvas, begin, copy_of, difference, edit, step
from workers.generator.image_loader import load_image_model

BOUNDARY = 0.7
"""Two of four steps, and three of six, are on each side of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wan"
    wan.write(folder, boundary=BOUNDARY)
    return folder


def load(folder: Path, dtype: str = "float64") -> Any:
    return load_image_model(folder, dtype, wan.SPEC.sizes, KEY)


def finish(canvases: list[Canvas]) -> None:
    while rest := [canvas for canvas in canvases if not canvas.is_complete]:
        step(rest)


def test_two_transformers_take_turns_in_one_batch(folder: Path) -> None:
    assert set(read_image_folder(folder).parts) >= {"transformer", "transformer_2"}
    model, requests = load(folder), wan.SPEC.requests[:2]
    first = begin(model, *requests[0])
    for _ in range(3):
        step([first])
    canvases = [first, begin(model, *requests[1])]
    finish(canvases)
    for canvas, request in zip(canvases, requests, strict=True):
        assert difference(canvas, wan.paint_whole(*request, boundary=BOUNDARY)) == 0.0
        assert difference(canvas, wan.paint_whole(*request)) > 1e-4


def test_the_second_transformer_is_required_by_its_index_alone(
    folder: Path, tmp_path: Path
) -> None:
    changed = copy_of(folder, tmp_path)
    weights = "transformer_2/diffusion_pytorch_model.safetensors"
    (changed / weights).unlink()
    assert list_missing_files(changed) == [weights]
    edit(changed / "model_index.json", transformer_2=[None, None])
    assert list_missing_files(changed) == []
    assert "transformer_2" not in read_image_folder(changed).parts
    with pytest.raises(ConfigError, match=r"boundary_ratio .* requires a transformer_2"):
        load(changed)


def test_without_pyav_the_folder_is_refused_by_the_name_of_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"needs PyAV .*: pip install 'pagemill\[video\]'"):
        read_image_folder(folder)


def test_patches_have_times(tmp_path: Path) -> None:
    wan.write(tmp_path, expands=True)
    # In float64, one time for all patches has the same result.
    canvas = begin(load(tmp_path, "float32"), *wan.SPEC.requests[0])
    finish([canvas])
    whole = wan.paint_whole(*wan.SPEC.requests[0], dtype=torch.float32, expands=True)
    assert difference(canvas, whole) == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("solver_order", 3), ("use_flow_sigmas", False), ("disable_corrector", [0])],
)
def test_other_settings_of_the_scheduler_are_refused(
    folder: Path, tmp_path: Path, name: str, value: object
) -> None:
    changed = copy_of(folder, tmp_path)
    edit(changed / "scheduler" / "scheduler_config.json", **{name: value})
    with pytest.raises(ConfigError) as refused:
        load(changed)
    assert refused.value.field == f"{KEY}.path"
    assert f"{name}: {value!r} is not supported, only " in refused.value.message
