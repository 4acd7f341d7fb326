"""Images to edit are read as diffusers reads them, or refused with the field."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.utils import load_image
from PIL import Image

from shared.config.schema import RendererConfig
from shared.errors import ConfigError, InvalidMedia, InvalidRequest, MediaTooLarge
from tests.generator.painters import WatchedPainter
from tests.generator.pipelines import qwen_image_edit
from tests.generator.pipelines.input_images import draw, file_of
from workers.generator.core.denoising import check_input_images, size_of
from workers.generator.diffusion.qwen_image_edit import AREA, fitted
from workers.generator.image_loader import load_image_model
from workers.generator.input_images import read_pixels

FIELD = "image.input_images[0]"
LIMITS = RendererConfig()
PHOTO = draw((40, 24))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6


def transparent() -> Image.Image:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("edit") / "model"
    qwen_image_edit.write(folder)
    return load_image_model(folder, "float32", ["48x48"], "models.m.stages.dit")


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (PHOTO, "PNG", {}),
        (PHOTO, "JPEG", {}),
        (PHOTO, "JPEG", {"exif": ROTATED}),
        (PHOTO, "WEBP", {"exif": ROTATED}),
        (PHOTO.convert("CMYK"), "JPEG", {}),
        (PHOTO.convert("L"), "PNG", {}),
        (PHOTO.convert("LA"), "PNG", {}),
        (PHOTO.convert("1"), "PNG", {}),
        (PHOTO.quantize(16), "PNG", {"transparency": 0}),
        (transparent(), "PNG", {}),
        (transparent(), "WEBP", {}),
    ],
)
def test_files_have_the_pixels_that_diffusers_reads(
    image: Image.Image, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    file = file_of(image, kind, **options)
    (tmp_path / "image").write_bytes(file)
    read = np.asarray(load_image(str(tmp_path / "image")))
    np.testing.assert_array_equal(read_pixels(file, LIMITS, FIELD), read)
    assert read.shape == ((40, 24, 3) if "exif" in options else (24, 40, 3))


@pytest.mark.parametrize(
    ("file", "limits", "error", "message"),
    [
        (b"not an image", LIMITS, InvalidMedia, "not a readable GIF, JPEG, PNG or WEBP image"),
        (b"", LIMITS, InvalidMedia, "the image's file is empty"),
        (file_of(PHOTO, "BMP"), LIMITS, InvalidMedia, "BMP is not accepted"),
        (file_of(PHOTO)[:-40], LIMITS, InvalidMedia, "damaged or incomplete"),
        (file_of(PHOTO), RendererConfig(max_image_pixels=959), MediaTooLarge, "960 pixels is over"),
        (file_of(PHOTO), RendererConfig(max_image_side=39), MediaTooLarge, "39 pixels a side"),
        (file_of(PHOTO), RendererConfig(max_image_bytes=99), MediaTooLarge, "limit of 99 bytes"),
    ],
)
def test_other_files_are_refused(
    file: bytes, limits: RendererConfig, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        read_pixels(file, limits, FIELD)
    assert getattr(refused.value, "field", None) == FIELD


@pytest.mark.parametrize("size", [(1, 1), (3000, 2000), (640, 480), (50, 5000), (16_384, 200)])
def test_images_are_read_in_the_sizes_of_the_pipelines(size: tuple[int, int]) -> None:
    calculate: Any = qwen_image_edit.CALCULATE
    for area in (1024 * 1024, 384 * 384):
        assert fitted(size, area) == calculate(area, size[0] / size[1])[:2]


def test_narrow_images_are_read_up_to_a_limit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "area", AREA)
    monkeypatch.setattr(model, "text_area", 384 * 384)
    for shape, size in (((2, 200, 3), (10_240, 96)), ((200, 2, 3), (96, 10_240))):
        read = model.read_image(np.zeros(shape, np.uint8), FIELD)
        assert size_of(read.for_latents) == size
    with pytest.raises(InvalidMedia, match="an image of 201 x 2 is too narrow") as refused:
        model.read_image(np.zeros((2, 201, 3), np.uint8), FIELD)
    assert refused.value.field == FIELD


def test_a_text_cannot_name_the_place_of_an_image(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("prompt: the text has <|image_pad|>")):
        model.check_text("a <|image_pad|> b", "prompt")


def test_a_stage_cannot_edit_more_images_than_its_model(model: Any) -> None:
    check_input_images(model, 1, "stage")
    check_input_images(WatchedPainter(), 0, "stage")
    for edits, count, message in (
        (model, 0, "stage.input_images: 0 is not possible: the model edits 1 to 1 images"),
        (model, 2, "stage.input_images: 2 is not possible: the model edits 1 to 1 images"),
        (WatchedPainter(), 1, "stage.input_images: 1 is not possible: the model edits no images"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_input_images(edits, count, "stage")
        assert refused.value.message == message
