"""Folders of PixArt-Sigma as they were published."""

import json
from pathlib import Path

import pytest
from diffusers import PixArtTransformer2DModel

from shared.errors import ConfigError
from tests.generator.pipelines.pixart_sigma import SPEC
from tests.generator.test_pipelines import difference, edit, load, paint


def test_files_as_they_were_published_are_read(tmp_path: Path) -> None:
    """The transformer has an earlier class, with settings that the later one does not have."""
    SPEC.write(tmp_path)
    edit(tmp_path / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    edit(
        tmp_path / "transformer" / "config.json",
        _class_name="Transformer2DModel",
        double_self_attention=False,
        num_vector_embeds=None,
        only_cross_attention=False,
        use_linear_projection=False,
    )
    scheduler = tmp_path / "scheduler" / "scheduler_config.json"
    assert json.loads(scheduler.read_text())["lambda_min_clipped"] == -float("inf")
    prompt, params = SPEC.requests[1]
    canvas = paint(load(tmp_path, SPEC, "float64"), prompt, params)
    assert difference(canvas, SPEC.paint_whole(prompt, params)) == 0.0


def test_a_transformer_that_reads_the_size_of_the_image_is_refused(tmp_path: Path) -> None:
    SPEC.write(tmp_path)
    folder = tmp_path / "transformer"
    settings = PixArtTransformer2DModel.load_config(folder) | {"use_additional_conditions": True}
    PixArtTransformer2DModel.from_config(settings).save_pretrained(folder)
    with pytest.raises(ConfigError, match="use_additional_conditions of the transformer is not"):
        load(tmp_path, SPEC, "float32")
