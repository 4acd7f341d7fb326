"""Settings and shapes of diffusers' folders are checked before any weight is loaded."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from shared.errors import ConfigError
from shared.models.image_folder import TOKENIZER_CONFIG, read_image_folder
from tests.generator.pipelines import (
    flux,
    pixart_sigma,
    qwen_image,
    stable_diffusion_3,
    wan,
    z_image,
)
from tests.generator.test_pipelines import KEY, difference, paint
from workers.cli.models.reports import check_folders
from workers.generator.image_loader import load_image_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES: tuple[Any, ...] = (flux, pixart_sigma, qwen_image, stable_diffusion_3, wan, z_image)
NAN = float("nan")
VALUES = (None, NAN, 0, -1, "x", 10**30)
CLIP, SCHEDULER = "text_encoder/config.json", "scheduler/scheduler_config.json"


@dataclass(repr=False)
class Case:
    """A pipeline of diffusers, its folder, and the places of the numbers in its files."""

    module: Any
    folder: Path
    places: list[tuple[str, tuple[Any, ...]]]

    def __repr__(self) -> str:
        return str(self.module.SPEC.name)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    cases = []
    for module in MODULES:
        folder = tmp_path_factory.mktemp("models") / module.SPEC.name
        module.SPEC.write(folder)
        files = [
            f"{name}/{component.config}"
            for name, component in read_image_folder(folder).components.items()
            if component.config != TOKENIZER_CONFIG
        ]
        places = [
            (file, path)
            for file in files
            for path in numbers_in(json.loads((folder / file).read_text()))
        ]
        cases.append(Case(module, folder, places))
    return cases


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each number, and of the first one in a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_in(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from numbers_in(value[0], (*path, 0))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def put(file: Path, path: tuple[Any, ...], value: Any) -> Any:
    """Replace a value in a file. Return the one before."""
    content = json.loads(file.read_text())
    owner = content
    for key in path[:-1]:
        owner = owner[key]
    before, owner[path[-1]] = owner[path[-1]], value
    file.write_text(json.dumps(content))
    return before


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.sampled_from(VALUES))
def test_a_changed_folder_is_refused_or_paints_what_diffusers_paints(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch, number: int, value: Any
) -> None:
    places = [(case, *place) for case in cases for place in case.places]
    case, name, path = places[number % len(places)]
    file, spec = case.folder / name, case.module.SPEC
    before = put(file, path, value)
    try:
        assume(before != value)
        try:
            model = load_image_model(case.folder, "float64", spec.sizes, KEY)
        except ConfigError as error:
            refusal = error.message
        else:
            refusal = ""
        if refusal:
            assert str(case.folder) in refusal
            assert "\n" not in refusal
            return
        pipeline: Any = type(case.module.build_pipeline()).from_pretrained(case.folder)
        pipeline.set_progress_bar_config(disable=True)
        with monkeypatch.context() as patched:
            patched.setattr(case.module, "build_pipeline", lambda dtype, **_: pipeline.to(dtype))
            prompt, params = spec.requests[0]
            whole = case.module.paint_whole(prompt, params)
        assert difference(paint(model, prompt, params), whole) <= spec.batch_difference
    finally:
        put(file, path, before)


@pytest.mark.parametrize(
    ("module", "file", "path", "value", "words"),
    [
        (flux, CLIP, ("num_hidden_layers",), 0, "num_hidden_layers of 0 must be more than 0"),
        (flux, CLIP, ("num_hidden_layers",), -1, "num_hidden_layers of -1 must be more than 0"),
        (flux, CLIP, ("num_hidden_layers",), 10**5, "must be at most 1000"),
        (flux, CLIP, ("eos_token_id",), None, "eos_token_id of null must be a whole number"),
        (flux, CLIP, ("layer_norm_eps",), None, "layer_norm_eps of null must be a number"),
        (flux, CLIP, ("layer_norm_eps",), NAN, "layer_norm_eps of NaN must be a number"),
        (flux, "vae/config.json", ("shift_factor",), None, "shift_factor of null must be a numb"),
        (flux, SCHEDULER, ("max_shift",), "x", 'max_shift of "x" must be a number'),
        (
            pixart_sigma,
            SCHEDULER,
            ("lambda_min_clipped",),
            NAN,
            "lambda_min_clipped of NaN must be a number",
        ),
        (
            wan,
            "vae/config.json",
            ("latents_std", 0),
            0,
            "must be a list of items, each more than 0",
        ),
        (
            qwen_image,
            CLIP,
            ("text_config", "hidden_size"),
            3.5,
            "text_config.hidden_size of 3.5 must be a whole number",
        ),
    ],
)
def test_a_setting_is_refused_by_its_file_before_anything_is_loaded(
    cases: list[Case], module: Any, file: str, path: tuple[Any, ...], value: Any, words: str
) -> None:
    folder = next(case.folder for case in cases if case.module is module)
    before, loaded = put(folder / file, path, value), list[str]()
    try:
        with pytest.raises(ConfigError) as refused:
            load_image_model(folder, "float32", module.SPEC.sizes, KEY, report=loaded.append)
    finally:
        put(folder / file, path, before)
    assert f"{folder / file}: " in refused.value.message
    assert words in refused.value.message
    assert not loaded


def test_the_commands_refuse_settings_and_shapes(cases: list[Case], tmp_path: Path) -> None:
    """The reports of `pagemill check`, in one process."""
    case = cases[0]
    weights = "vae/diffusion_pytorch_model.safetensors"
    folders = [Path(shutil.copytree(case.folder, tmp_path / name)) for name in ("a", "b", "c")]
    put(folders[0] / CLIP, ("num_hidden_layers",), 0)
    tensors = load_file(folders[1] / weights)
    tensors["decoder.conv_in.bias"] = np.zeros(5, np.float32)
    save_file(tensors, folders[1] / weights)
    reasons = [report.reason for report in check_folders(folders)]
    assert reasons == [
        f"{CLIP}: num_hidden_layers of 0 must be more than 0",
        f"{weights}: decoder.conv_in.bias has the shape [5], but config.json requires [8]",
        None,
    ]


@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
def test_a_weight_of_another_shape_is_refused_before_anything_is_loaded(
    cases: list[Case], tmp_path: Path, part: str
) -> None:
    for case in cases:
        folder = Path(shutil.copytree(case.folder, tmp_path / case.module.SPEC.name))
        file = sorted((folder / part).glob("*.safetensors"))[-1]
        tensors = load_file(file)
        name = sorted(tensors)[-1]
        tensors[name] = np.zeros((3, 3, 3), np.float32)
        save_file(tensors, file)
        loaded: list[str] = []
        with pytest.raises(ConfigError) as refused:
            load_image_model(folder, "float32", case.module.SPEC.sizes, KEY, report=loaded.append)
        assert f"{file}: {name} has the shape [3, 3, 3], but config" in refused.value.message
        assert not loaded
