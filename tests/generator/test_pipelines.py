"""Pipelines step by step, compared with those of diffusers on the same weights and noise.

Images are compared before they are rounded to 8 bits, with a difference of 0.0 in float64.
"""

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import ConfigError, ContextTooLong, InvalidRequest, NumberOverflow
from shared.models.image_folder import read_image_folder
from shared.protocol.images import AUTO, PaintParams, parse_size
from shared.protocol.pipeline import LATENTS, STEPS, TEXTS
from tests.generator.pipelines import (
    flux,
    pixart_sigma,
    qwen_image,
    qwen_image_edit,
    qwen_image_edit_plus,
    stable_diffusion_3,
    wan,
    z_image,
)
from tests.generator.pipelines.input_images import pixels_of
from tests.generator.pipelines.spec import PipelineSpec, to_file
from workers.generator.core.denoising import (
    Condition,
    Progress,
    Size,
    Step,
    check_guidance,
    negative_of,
    noise_of,
    noise_shape_of,
    size_of,
)
from workers.generator.core.painting import decode_state, encode_state
from workers.generator.image_loader import load_image_model

pytestmark = pytest.mark.usefixtures("one_thread")

KEY = "models.painter.stages.dit"
MODULES = (
    qwen_image,
    qwen_image_edit,
    qwen_image_edit_plus,
    flux,
    stable_diffusion_3,
    z_image,
    pixart_sigma,
    wan,
)
SPECS: dict[str, PipelineSpec] = {module.SPEC.name: module.SPEC for module in MODULES}
ARRIVALS = (0, 1, 1, 2, 2, 3)
"""Ticks at which the requests arrive."""


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> PipelineSpec:
    spec: PipelineSpec = SPECS[request.param]
    # Several tests compare the same images.
    return spec._replace(paint_whole=functools.cache(spec.paint_whole))


@pytest.fixture(scope="module")
def folder(spec: PipelineSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / spec.name
    spec.write(folder)
    return folder


def load(folder: Path, spec: PipelineSpec, dtype: str, sizes: Sequence[str] = ()) -> Any:
    return load_image_model(folder, dtype, sizes or spec.sizes, KEY)


@pytest.fixture(scope="module")
def exact(folder: Path, spec: PipelineSpec) -> Any:
    """The model in float64."""
    return load(folder, spec, "float64")


@pytest.fixture(scope="module")
def single(folder: Path, spec: PipelineSpec) -> Any:
    """The model in float32."""
    return load(folder, spec, "float32")


@dataclass
class Canvas:
    """An image on its way."""

    model: Any
    params: PaintParams
    prompt: Condition
    negative: Condition | None
    progress: Progress
    size: Size
    done: int = 0

    @property
    def step(self) -> Step:
        params = self.params
        return Step(
            self.progress,
            self.prompt,
            self.negative,
            params.guidance,
            self.size,
            self.done,
            params.steps,
        )

    @property
    def is_complete(self) -> bool:
        return self.done == self.params.steps

    def pixels(self) -> Any:
        return self.model.pixels(self.progress.latents, self.size)

    def decode(self) -> torch.Tensor:
        image: torch.Tensor = self.model.decode(self.progress.latents, self.size)
        return image


def begin(model: Any, prompt: str, params: PaintParams, number: int = 0) -> Canvas:
    assert params.seed is not None
    images = [model.read_image(pixels_of(url), "image") for url in params.input_images]
    size = size_of(images[-1].for_latents) if params.size == AUTO else parse_size(params.size)
    negative = negative_of(model, params)
    texts = [prompt] if negative is None else [prompt, negative]
    encoded = model.encode_edit(texts, images) if images else model.encode(texts)
    noise = noise_of(params.seed, number, noise_shape_of(model, size, params.frames))
    begun = model.begin(size, noise)
    return Canvas(model, params, encoded[0], (*encoded[1:], None)[0], begun, size)


def step(canvases: Sequence[Canvas]) -> None:
    """Compute one step of each image in one batch."""
    results = canvases[0].model.step([canvas.step for canvas in canvases])
    for canvas, result in zip(canvases, results, strict=True):
        canvas.progress, canvas.done = result.progress, canvas.done + 1


def paint(model: Any, prompt: str, params: PaintParams, number: int = 0) -> Canvas:
    canvas = begin(model, prompt, params, number)
    while not canvas.is_complete:
        step([canvas])
    return canvas


def paint_together(model: Any, spec: PipelineSpec) -> tuple[list[Canvas], list[int]]:
    """Paint the requests as they arrive; also return the sizes of the batches."""
    canvases: dict[int, Canvas] = {}
    sizes = []
    for tick in range(20):
        for number, (prompt, params) in enumerate(spec.requests):
            if ARRIVALS[number] == tick:
                canvases[number] = begin(model, prompt, params)
        groups: dict[Any, list[Canvas]] = {}
        for canvas in canvases.values():
            if not canvas.is_complete:
                groups.setdefault((canvas.size, canvas.prompt.image_sizes), []).append(canvas)
        for group in groups.values():
            step(group)
            sizes.append(len(group))
    return [canvases[number] for number in range(len(spec.requests))], sizes


def difference(canvas: Canvas, whole: Any) -> float:
    return float((canvas.decode().movedim(0, -1) - torch.from_numpy(whole)).abs().max())


def test_images_equal_the_pipelines(exact: Any, spec: PipelineSpec) -> None:
    for prompt, params in spec.requests:
        assert difference(paint(exact, prompt, params), spec.paint_whole(prompt, params)) == 0.0


def test_stages_that_load_their_own_parts_paint_the_same(folder: Path, spec: PipelineSpec) -> None:
    texts, steps, latents = (
        load_image_model(folder, "float64", spec.sizes, KEY, work=[work])
        for work in (TEXTS, STEPS, LATENTS)
    )
    prompt, params = spec.requests[0]
    # Only the encoder of texts computes here.
    canvas = begin(texts, prompt, params)
    canvas.model = steps
    while not canvas.is_complete:
        step([canvas])
    canvas.model = latents
    assert difference(canvas, spec.paint_whole(prompt, params)) == 0.0


def test_images_that_share_batches_equal_the_pipelines(exact: Any, spec: PipelineSpec) -> None:
    canvases, sizes = paint_together(exact, spec)
    assert max(sizes) == 4
    assert all(canvas.is_complete for canvas in canvases)
    for canvas, (prompt, params) in zip(canvases, spec.requests, strict=True):
        whole = spec.paint_whole(prompt, params)
        assert difference(canvas, whole) <= spec.batch_difference
        np.testing.assert_array_equal(canvas.pixels(), to_file(whole))


def test_images_that_are_alone_equal_the_pipelines_in_single_precision(
    single: Any, spec: PipelineSpec
) -> None:
    for prompt, params in spec.requests:
        canvas = paint(single, prompt, params)
        whole = spec.paint_whole(prompt, params, dtype=torch.float32)
        assert difference(canvas, whole) == 0.0
        np.testing.assert_array_equal(canvas.pixels(), to_file(whole))


def test_batches_change_only_the_last_bits_in_single_precision(
    single: Any, spec: PipelineSpec
) -> None:
    canvases, _ = paint_together(single, spec)
    for canvas, (prompt, params) in zip(canvases, spec.requests, strict=True):
        whole = spec.paint_whole(prompt, params, dtype=torch.float32)
        assert difference(canvas, whole) < 5e-6
        pixels, file = canvas.pixels(), to_file(whole).astype(int)
        # A value next to the middle of two numbers may be rounded to the other one.
        assert np.abs(pixels - file).max() <= 1
        assert (pixels != file).sum() <= 2


def test_the_images_of_a_request_have_their_own_noise(exact: Any, spec: PipelineSpec) -> None:
    prompt, params = spec.requests[0]
    images = [paint(exact, prompt, params, number) for number in range(3)]
    for number, canvas in enumerate(images):
        assert difference(canvas, spec.paint_whole(prompt, params, number)) == 0.0
    assert difference(images[0], spec.paint_whole(prompt, params, 1)) > 0.01


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_image_that_is_resumed_after_any_step_is_the_same(
    folder: Path, spec: PipelineSpec, dtype: str
) -> None:
    model, (prompt, params) = load(folder, spec, dtype), spec.requests[1]
    whole = paint(model, prompt, params)
    assert whole.progress.latents.dtype == (spec.latents_dtype or dtype)
    for done in range(1, params.steps):
        before = begin(model, prompt, params)
        for _ in range(done):
            step([before])
        after = begin(model, prompt, params)
        progress = decode_state(encode_state(before.progress, done), done, after.progress)
        assert progress is not None
        after.progress, after.done = progress, done
        while not after.is_complete:
            step([after])
        assert after.progress.latents.data == whole.progress.latents.data


def test_the_preview_after_the_last_step_is_the_image(exact: Any, spec: PipelineSpec) -> None:
    canvas = begin(exact, *spec.requests[0])
    while canvas.done < canvas.params.steps - 1:
        step([canvas])
    (last,) = exact.step([canvas.step])
    step([canvas])
    assert last.preview.data == canvas.progress.latents.data


@pytest.mark.parametrize(
    "change",
    [
        lambda prompt, params: ("a green square", params),
        lambda prompt, params: (prompt, msgspec.structs.replace(params, steps=5)),
        lambda prompt, params: (prompt, msgspec.structs.replace(params, guidance=3.5)),
        lambda prompt, params: (prompt, msgspec.structs.replace(params, guidance=1.0)),
        lambda prompt, params: (prompt, msgspec.structs.replace(params, negative_prompt="x")),
        lambda prompt, params: (prompt, msgspec.structs.replace(params, seed=2)),
    ],
)
def test_the_comparison_sees_another_request(
    exact: Any,
    spec: PipelineSpec,
    change: Callable[[str, PaintParams], tuple[str, PaintParams]],
) -> None:
    prompt, params = change(*spec.requests[0])
    if exact.empty_negative is None and params.negative_prompt:
        with pytest.raises(InvalidRequest, match=r"image\.negative_prompt: .* has no negative pro"):
            check_guidance(exact, params)
        return
    whole = spec.paint_whole(*spec.requests[0])
    assert difference(paint(exact, prompt, params), whole) > 1e-4


def test_the_comparison_sees_other_settings(
    folder: Path, spec: PipelineSpec, tmp_path: Path
) -> None:
    whole = spec.paint_whole(*spec.requests[0])
    for number, (file, key, value) in enumerate(spec.settings):
        changed = copy_of(folder, tmp_path / str(number))
        edit(changed / file, **{key: value})
        canvas = paint(load(changed, spec, "float64"), *spec.requests[0])
        assert difference(canvas, whole) > 1e-4, key


def test_the_longest_prompt_is_read_to_its_end_and_a_longer_one_is_refused(
    exact: Any, spec: PipelineSpec
) -> None:
    num_around = exact.check_text("", "prompt")
    longest = "a" * (spec.max_tokens - num_around)
    assert exact.check_text(longest, "prompt") == spec.max_tokens
    params = msgspec.structs.replace(spec.requests[0][1], steps=2)
    assert difference(paint(exact, longest, params), spec.paint_whole(longest, params)) == 0.0
    with pytest.raises(ContextTooLong) as refused:
        exact.check_text(longest + "b", "image.negative_prompt")
    assert refused.value.field == "image.negative_prompt"
    assert (
        f"{spec.max_tokens + 1} tokens, over the model's limit of {spec.max_tokens}"
        in refused.value.message
    )
    longer = longest + "b" * num_around
    wholes = [spec.paint_whole(text, params) for text in (longer, longer + "c")]
    assert np.array_equal(*wholes) == spec.cuts_texts


def test_sizes_that_the_networks_do_not_have_are_refused(folder: Path, spec: PipelineSpec) -> None:
    for size, message in spec.bad_sizes:
        with pytest.raises(ConfigError) as refused:
            load(folder, spec, "float32", [size])
        assert refused.value.message == f"{KEY}.sizes: {message}"


def test_settings_that_are_not_computed_are_refused(
    folder: Path, spec: PipelineSpec, tmp_path: Path
) -> None:
    for number, (file, key, value, message) in enumerate(spec.refused):
        changed = copy_of(folder, tmp_path / str(number))
        edit(changed / file, **{key: value})
        with pytest.raises(ConfigError) as refused:
            load(changed, spec, "float32")
        assert refused.value.field == f"{KEY}.path"
        assert message in refused.value.message


def test_parts_of_another_width_are_refused_before_anything_is_loaded(
    folder: Path, spec: PipelineSpec, tmp_path: Path
) -> None:
    fits = read_image_folder(folder).family.fits
    assert fits
    for fit in fits:
        changed = copy_of(folder, tmp_path / fit.setting)
        file = changed / "transformer" / "config.json"
        edit(file, **{fit.setting: json.loads(file.read_text())[fit.setting] + fit.times})
        with pytest.raises(ConfigError) as refused:
            read_image_folder(changed)
        assert f"has parts that do not fit: {fit.setting} of " in refused.value.message


def test_an_overflow_is_an_error_instead_of_a_black_image(exact: Any, spec: PipelineSpec) -> None:
    size = parse_size(spec.sizes[0])
    noise = np.full(noise_shape_of(exact, size, spec.requests[0][1].frames), np.nan)
    with pytest.raises(NumberOverflow, match=r"not finite, an overflow in float64"):
        exact.pixels(exact.begin(size, noise).latents, size)


def test_each_part_is_announced_with_its_size_before_it_is_loaded(
    folder: Path, spec: PipelineSpec
) -> None:
    steps: list[str] = []
    load_image_model(folder, "bfloat16", spec.sizes, KEY, "cpu", steps.append)
    description = read_image_folder(folder)
    assert sorted(steps) == sorted(
        f"loading the {part.replace('_', ' ')},"
        f" {description.num_bytes(part, 'bfloat16') / 2**20:.0f} MiB"
        for part in description.parts
    )


def test_weights_that_are_missing_are_not_made_up(
    folder: Path, spec: PipelineSpec, tmp_path: Path
) -> None:
    changed = copy_of(folder, tmp_path)
    setting, words = spec.layers
    edit(changed / "transformer" / "config.json", **{setting: 3})
    with pytest.raises(ConfigError) as refused:
        load(changed, spec, "float32")
    assert refused.value.field == f"{KEY}.path"
    assert words in refused.value.message


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "changed"))


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
