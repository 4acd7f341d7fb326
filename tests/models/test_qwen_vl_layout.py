"""The pixels that the engine restores equal the pixels of transformers' processor bit for bit.

Files of every mode, images of every size, and processors of other models and settings.
"""

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec.tensors import to_torch
from shared.config.schema import ModelConfig, RendererConfig
from shared.models.media import DecodedImage
from shared.protocol.multimodal import IMAGE
from tests.renderer.processing.test_processor import TEMPLATE, VISION, write_model
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.processing.processor import ProcessedImage, Processor

FIELD = "field"
QWEN2_VL = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2-VL": QWEN2_VL,
    "Qwen2.5-VL": {"min_pixels": 4 * 28 * 28, "max_pixels": 28 * 28 * 100},
    "other patches": QWEN2_VL | {"patch_size": 16},
    "small patches that are not merged": QWEN2_VL | {"patch_size": 8, "merge_size": 1},
    "four merged to one side": QWEN2_VL | {"patch_size": 7, "merge_size": 4},
    "one frame": QWEN2_VL | {"temporal_patch_size": 1},
    "four frames": QWEN2_VL | {"temporal_patch_size": 4},
    "other mean and deviation": QWEN2_VL
    | {"image_mean": [0.5, 0.1, 0.9], "image_std": [0.5, 0.25, 1.5]},
    "another scale": QWEN2_VL | {"rescale_factor": 1 / 127.5},
    "not rescaled": QWEN2_VL | {"do_rescale": False},
    "not normalised": QWEN2_VL | {"do_normalize": False},
    "neither": QWEN2_VL | {"do_rescale": False, "do_normalize": False},
    "bilinear": QWEN2_VL | {"resample": 2},
    "nearest": QWEN2_VL | {"resample": 0},
    "few pixels": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 2},
    "many pixels": {"min_pixels": 28 * 28 * 60, "max_pixels": 28 * 28 * 128},
}
SIZES = [(1, 1), (1, 2), (2, 1), (13, 14), (27, 27), (28, 28), (29, 29), (56, 56), (57, 55)]
SIZES += [(1, 200), (200, 1), (3, 599), (599, 3), (300, 200), (201, 333), (640, 480)]

Loaded = tuple[Processor, Qwen2VLImageProcessorPil]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Ours and transformers' own, of one folder; made once for each of `SETTINGS`."""
    processors: dict[str, Loaded] = {}

    def load(name: str) -> Loaded:
        if name not in processors:
            folder = write_model(tmp_path_factory.mktemp("model"), VISION, TEMPLATE)
            settings = {"image_processor_type": "Qwen2VLImageProcessor"} | SETTINGS[name]
            (folder / "preprocessor_config.json").write_text(json.dumps(settings))
            own = Qwen2VLImageProcessorPil.from_pretrained(folder)
            processors[name] = Processor(ModelConfig(str(folder))), own
        return processors[name]

    return load


def noise(size: tuple[int, int], channels: int = 3) -> np.ndarray:
    width, height = size
    rng = np.random.default_rng(width * 1000 + height)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def restored(picture: ProcessedImage, num_frames: int) -> np.ndarray:
    """Restore values as the engine does: by the table, with the one frame repeated."""
    names = ("pixel_patches", "pixel_table")
    patches, table = (to_torch(picture.fields[name]).numpy() for name in names)
    values = np.stack([table[c][patches[:, c]] for c in range(3)], axis=1)
    return np.repeat(values[:, :, None], num_frames, axis=2).reshape(len(values), -1)


def assert_same(loaded: Loaded, image: Image.Image, expected: Image.Image) -> None:
    """`image` is what we have decoded, `expected` what transformers is given."""
    ours, own = loaded
    picture = ours.process(DecodedImage(image, "hash"), FIELD, "")
    inputs = own(images=[expected], return_tensors="np")
    values = restored(picture, own.temporal_patch_size)
    theirs = inputs["pixel_values"].astype(np.float32)
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), theirs.view(np.uint32))
    grid = to_torch(picture.fields["image_grid_thw"]).tolist()
    assert grid == inputs["image_grid_thw"][0].tolist()
    assert picture.num_tokens * own.merge_size**2 == np.prod(grid)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_processor_and_size(load: Callable[[str], Loaded], name: str) -> None:
    for size in SIZES:
        image = Image.fromarray(noise(size))
        assert_same(load(name), image, image)


@given(st.data())
def test_any_size(load: Callable[[str], Loaded], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SETTINGS)))
    short = data.draw(st.integers(1, 120))
    long = data.draw(st.integers(short, min(200 * short, 1200)))
    size = data.draw(st.sampled_from([(short, long), (long, short)]))
    image = Image.fromarray(noise(size))
    assert_same(load(name), image, image)


def over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def as_it_is(image: Image.Image) -> Image.Image:
    return image


def palette(transparency: int | bytes | None = None) -> bytes:
    image = Image.fromarray(noise((90, 61))).quantize(32)
    options = {} if transparency is None else {"transparency": transparency}
    return saved(image, "PNG", **options)


def saved(image: Image.Image, fmt: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def in_mode(mode: str, fmt: str = "PNG", **options: Any) -> bytes:
    rgba = Image.fromarray(noise((90, 61), 4))
    return saved(rgba.convert(mode), fmt, **options)


def deep_grey() -> bytes:
    values = np.random.default_rng(3).integers(0, 2**16, (61, 90), dtype=np.uint16)
    return saved(Image.fromarray(values), "PNG")


def upper_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


FILES: dict[str, tuple[bytes, Callable[[Image.Image], Image.Image]]] = {
    "RGB PNG": (in_mode("RGB"), as_it_is),
    "RGB JPEG": (in_mode("RGB", "JPEG"), as_it_is),
    "RGB progressive JPEG": (in_mode("RGB", "JPEG", progressive=True, quality=60), as_it_is),
    "RGB WEBP": (in_mode("RGB", "WEBP"), as_it_is),
    "grey PNG": (in_mode("L"), as_it_is),
    "grey JPEG": (in_mode("L", "JPEG"), as_it_is),
    "black and white": (in_mode("1"), as_it_is),
    "a palette": (palette(), as_it_is),
    "CMYK": (in_mode("CMYK", "JPEG"), as_it_is),
    "a palette with one colour transparent": (palette(3), over_white),
    "a palette half transparent": (palette(bytes(range(0, 256, 8))), over_white),
    "RGB with one colour transparent": (
        saved(Image.fromarray(noise((90, 61)) // 128 * 255), "PNG", transparency=(255, 0, 0)),
        over_white,
    ),
    "RGBA PNG": (in_mode("RGBA"), over_white),
    "RGBA WEBP": (in_mode("RGBA", "WEBP", lossless=True), over_white),
    "LA": (in_mode("LA"), over_white),
    "16 bits of grey": (deep_grey(), upper_bits),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ["Qwen2-VL", "other patches", "neither"])
def test_every_mode(load: Callable[[str], Loaded], file: str, name: str) -> None:
    data, expected = FILES[file]
    ours = decode_image(data, RendererConfig(), FIELD).image
    assert_same(load(name), ours, expected(Image.open(io.BytesIO(data))))


def test_different_settings_have_different_fingerprints(load: Callable[[str], Loaded]) -> None:
    """Or the tests above would compare one with itself."""
    assert len({load(name)[0].hash_media(IMAGE, "file", "") for name in SETTINGS}) == len(SETTINGS)
