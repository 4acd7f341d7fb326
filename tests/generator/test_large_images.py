"""Images beyond the named sizes, decoded in tiles as after `enable_tiling` of diffusers."""

from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from shared.errors import ConfigError
from shared.protocol.images import SizeRule
from tests.generator.pipelines import qwen_image, z_image
from tests.generator.test_pipelines import KEY, difference, paint
from workers.generator.diffusion import pixels
from workers.generator.image_loader import load_image_model

RULE = SizeRule(16, 2048 * 2048, 4096)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (z_image, "48x64"),  # Its tiles have 32 x 32 pixels.
        (qwen_image, "288x48"),  # Its tiles have 256 x 256 pixels.
    ],
)
def test_a_large_image_is_decoded_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, size: str
) -> None:
    spec = module.SPEC
    spec.write(tmp_path)
    model = load_image_model(tmp_path, "float64", ["48x48"], KEY, rule=RULE)
    prompt, params = spec.requests[0]
    params = msgspec.structs.replace(params, size=size)
    vae = module.build_pipeline(torch.float64).vae
    whole = spec.paint_whole(prompt, params)
    vae.enable_tiling()
    try:
        tiled = spec.paint_whole(prompt, params)
    finally:
        vae.disable_tiling()
    canvas = paint(model, prompt, params)
    # Blending may change the last bit.
    assert difference(canvas, whole) < 1e-14
    monkeypatch.setattr(pixels, "MAX_WHOLE_PIXELS", 48 * 48)
    assert difference(canvas, tiled) < 1e-14
    assert difference(canvas, whole) > 1e-4
    # The next image of another size is decoded as a whole.
    small = msgspec.structs.replace(params, size="48x48")
    assert difference(paint(model, prompt, small), spec.paint_whole(prompt, small)) == 0.0


def test_a_model_whose_sizes_are_other_multiples_needs_their_names(tmp_path: Path) -> None:
    qwen_image.SPEC.write(tmp_path)
    with pytest.raises(ConfigError, match="multiples of more than 8: name them here") as refused:
        load_image_model(tmp_path, "float32", ["48x48"], KEY, rule=RULE._replace(multiple=8))
    assert refused.value.field == f"{KEY}.sizes"
