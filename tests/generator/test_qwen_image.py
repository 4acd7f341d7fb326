"""Qwen-Image step by step, compared with the pipeline of diffusers on the same weights and noise.

Images are compared before they are rounded to 8 bits, with a difference of 0.0 in float64.
"""

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
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError, ContextTooLong, WorkerFailure
from shared.models.image_folder import read_image_folder
from shared.protocol.images import PaintParams, parse_size
from tests.generator import qwen_images
from tests.generator.qwen_images import paint_file, paint_whole
from workers.generator.core.denoising import Condition, Progress, Step, noise_of
from workers.generator.core.painting import decode_state, encode_state
from workers.generator.diffusion.qwen_image import QwenImage
from workers.generator.image_loader import load_image_model

KEY = "models.painter.stages.dit"
SIZES = ["48x48", "96x48", "48x96"]
REQUESTS = (
    ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
    ("two blue cats on a long table", PaintParams("48x48", 1, 6, 2.0, "", 2)),
    ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
    ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
    # The packed latents have the shape of the ones before, but another grid.
    ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
    ("Bäume {0}", PaintParams("48x48", 1, 5, 1.5, "", 2**63 - 1)),
)
ARRIVALS = (0, 1, 1, 2, 2, 3)
"""Ticks at which the requests arrive."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen-image"
    qwen_images.write(folder)
    return folder


def load(folder: Path, dtype: str, sizes: Sequence[str] = SIZES) -> QwenImage:
    model = load_image_model(folder, dtype, sizes, KEY)
    assert isinstance(model, QwenImage)
    return model


@pytest.fixture(scope="module")
def exact(folder: Path) -> QwenImage:
    """The model in float64."""
    return load(folder, "float64")


@pytest.fixture(scope="module")
def single(folder: Path) -> QwenImage:
    """The model in float32."""
    return load(folder, "float32")


@dataclass
class Canvas:
    """An image on its way."""

    model: QwenImage
    params: PaintParams
    prompt: Condition
    negative: Condition | None
    progress: Progress
    done: int = 0

    @property
    def step(self) -> Step:
        params = self.params
        return Step(
            self.progress,
            self.prompt,
            self.negative,
            params.guidance,
            parse_size(params.size),
            self.done,
            params.steps,
        )

    @property
    def is_complete(self) -> bool:
        return self.done == self.params.steps

    def decode(self) -> torch.Tensor:
        return self.model.decode(self.progress.latents, parse_size(self.params.size))


def begin(model: QwenImage, prompt: str, params: PaintParams, number: int = 0) -> Canvas:
    assert params.seed is not None
    size = parse_size(params.size)
    texts = model.encode([prompt, params.negative_prompt or model.empty_negative])
    noise = noise_of(params.seed, number, model.noise_shape(size))
    negative = None if params.guidance == 1.0 else texts[1]
    return Canvas(model, params, texts[0], negative, model.begin(size, noise))


def step(canvases: Sequence[Canvas]) -> None:
    """Compute one step of each image in one batch."""
    results = canvases[0].model.step([canvas.step for canvas in canvases])
    for canvas, result in zip(canvases, results, strict=True):
        canvas.progress, canvas.done = result.progress, canvas.done + 1


def paint(model: QwenImage, prompt: str, params: PaintParams, number: int = 0) -> Canvas:
    canvas = begin(model, prompt, params, number)
    while not canvas.is_complete:
        step([canvas])
    return canvas


def paint_together(model: QwenImage) -> tuple[list[Canvas], list[int]]:
    """Paint the requests as they arrive; also return the sizes of the batches."""
    canvases: dict[int, Canvas] = {}
    sizes = []
    for tick in range(20):
        for number, (prompt, params) in enumerate(REQUESTS):
            if ARRIVALS[number] == tick:
                canvases[number] = begin(model, prompt, params)
        for size in SIZES:
            group = [c for c in canvases.values() if c.params.size == size and not c.is_complete]
            if group:
                step(group)
                sizes.append(len(group))
    return [canvases[number] for number in range(len(REQUESTS))], sizes


def difference(canvas: Canvas, whole: Any) -> float:
    return float((canvas.decode().permute(1, 2, 0) - torch.from_numpy(whole)).abs().max())


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_an_image_equals_the_pipelines(exact: QwenImage, number: int) -> None:
    prompt, params = REQUESTS[number]
    assert difference(paint(exact, prompt, params), paint_whole(prompt, params)) == 0.0


def test_images_that_share_batches_equal_the_pipelines(exact: QwenImage) -> None:
    canvases, sizes = paint_together(exact)
    assert max(sizes) == 4
    assert all(canvas.is_complete for canvas in canvases)
    for canvas, (prompt, params) in zip(canvases, REQUESTS, strict=True):
        assert difference(canvas, paint_whole(prompt, params)) == 0.0


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_an_image_that_is_alone_equals_the_pipelines_in_single_precision(
    single: QwenImage, number: int
) -> None:
    prompt, params = REQUESTS[number]
    canvas = paint(single, prompt, params)
    assert difference(canvas, paint_whole(prompt, params, dtype=torch.float32)) == 0.0
    pixels = single.pixels(canvas.progress.latents, parse_size(params.size))
    np.testing.assert_array_equal(pixels, paint_file(prompt, params, dtype=torch.float32))


def test_batches_change_only_the_last_bits_in_single_precision(single: QwenImage) -> None:
    canvases, _ = paint_together(single)
    for canvas, (prompt, params) in zip(canvases, REQUESTS, strict=True):
        assert difference(canvas, paint_whole(prompt, params, dtype=torch.float32)) < 5e-6
        file = paint_file(prompt, params, dtype=torch.float32).astype(int)
        pixels = single.pixels(canvas.progress.latents, parse_size(params.size))
        # A value next to the middle of two numbers may be rounded to the other one.
        assert np.abs(pixels - file).max() <= 1
        assert (pixels != file).sum() <= 2


def test_the_images_of_a_request_have_their_own_noise(exact: QwenImage) -> None:
    prompt, params = REQUESTS[0]
    images = [paint(exact, prompt, params, number) for number in range(3)]
    for number, canvas in enumerate(images):
        assert difference(canvas, paint_whole(prompt, params, number)) == 0.0
    assert difference(images[0], paint_whole(prompt, params, 1)) > 0.01


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_image_that_is_resumed_after_any_step_is_the_same(folder: Path, dtype: str) -> None:
    model, (prompt, params) = load(folder, dtype), REQUESTS[1]
    whole = paint(model, prompt, params)
    assert whole.progress.latents.dtype == dtype
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


def test_the_preview_after_the_last_step_is_the_image(exact: QwenImage) -> None:
    canvas = begin(exact, *REQUESTS[0])
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
    exact: QwenImage, change: Callable[[str, PaintParams], tuple[str, PaintParams]]
) -> None:
    prompt, params = change(*REQUESTS[0])
    assert difference(paint(exact, prompt, params), paint_whole(*REQUESTS[0])) > 1e-4


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("vae/config.json", "latents_mean", [0.0, 0.0, 0.0, 0.0]),
        ("vae/config.json", "latents_std", [1.0, 1.0, 1.0, 1.0]),
        ("scheduler/scheduler_config.json", "max_shift", 1.15),
        ("scheduler/scheduler_config.json", "shift_terminal", None),
    ],
)
def test_the_comparison_sees_other_settings(
    folder: Path, tmp_path: Path, file: str, key: str, value: Any
) -> None:
    changed = copy_of(folder, tmp_path)
    edit(changed / file, **{key: value})
    canvas = paint(load(changed, "float64"), *REQUESTS[0])
    assert difference(canvas, paint_whole(*REQUESTS[0])) > 1e-4


def test_the_longest_prompt_is_read_to_its_end_and_a_longer_one_is_refused(
    exact: QwenImage,
) -> None:
    limit = 1024
    num_around = exact.check_text("", "prompt")
    longest = "a" * (limit - num_around)
    assert exact.check_text(longest, "prompt") == limit
    params = PaintParams("48x48", 1, 2, 2.0, "", 1)
    assert difference(paint(exact, longest, params), paint_whole(longest, params)) == 0.0
    with pytest.raises(ContextTooLong) as refused:
        exact.check_text(longest + "b", "image.negative_prompt")
    assert refused.value.field == "image.negative_prompt"
    assert "1025 tokens, over the model's limit of 1024" in refused.value.message
    # diffusers cuts it silently.
    longer = longest + "b" * num_around
    assert np.array_equal(paint_whole(longer, params), paint_whole(longer + "c", params))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("56x48", "56x48: width and height must be multiples of 16"),
        ("8192x8192", "8192x8192: 262144 patches are over the limit of 16384"),
    ],
)
def test_sizes_that_the_networks_do_not_have_are_refused(
    folder: Path, size: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder, "float32", [size])
    assert refused.value.message == f"{KEY}.sizes: {message}"


def test_an_overflow_is_an_error_instead_of_a_black_image(exact: QwenImage) -> None:
    size = (48, 48)
    noise = np.full(exact.noise_shape(size), np.nan)
    with pytest.raises(WorkerFailure, match=r"not finite: .* overflow in torch.float64"):
        exact.pixels(exact.begin(size, noise).latents, size)


def test_each_part_is_announced_with_its_size_before_it_is_loaded(folder: Path) -> None:
    steps: list[str] = []
    load_image_model(folder, "bfloat16", SIZES, KEY, "cpu", steps.append)
    parts = read_image_folder(folder).parts
    bytes_of = (
        ("vae", "vae", 4),
        ("text encoder", "text_encoder", 2),
        ("transformer", "transformer", 2),
    )
    assert steps == [
        f"loading the {name}, {parts[part].num_parameters * item_bytes / 2**20:.0f} MiB"
        for name, part, item_bytes in bytes_of
    ]


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    changed = copy_of(folder, tmp_path)
    edit(changed / "transformer" / "config.json", num_layers=3)
    with pytest.raises(ConfigError) as refused:
        load(changed, "float32")
    assert refused.value.field == f"{KEY}.path"
    assert "lacks weights: transformer_blocks.2." in refused.value.message


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "changed"))


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_files_as_they_were_published_are_read(folder: Path, tmp_path: Path) -> None:
    """The text encoder has the names of transformers 4.51, and the tokenizer has two files."""
    changed = copy_of(folder, tmp_path)
    weights = changed / "text_encoder" / "model.safetensors"
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(weights).items()
    }
    assert {"visual.merger.mlp.0.weight", "model.norm.weight", "lm_head.weight"} <= renamed.keys()
    save_file(renamed, weights, metadata={"format": "pt"})
    tokens = changed / "tokenizer" / "tokenizer.json"
    content = json.loads(tokens.read_text())
    (changed / "tokenizer" / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (changed / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    tokens.unlink()
    # Settings that later versions of the classes do not have.
    edit(changed / "transformer" / "config.json", pooled_projection_dim=768)
    prompt, params = REQUESTS[1]
    canvas = paint(load(changed, "float64"), prompt, params)
    assert difference(canvas, paint_whole(prompt, params)) == 0.0
