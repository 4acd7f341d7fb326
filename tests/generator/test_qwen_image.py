"""Folders of Qwen-Image as they were published."""

import json
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from shared.errors import InvalidRequest
from tests.generator.pipelines.qwen_image import SPEC
from tests.generator.test_pipelines import difference, edit, load, paint


def test_files_as_they_were_published_are_read(tmp_path: Path) -> None:
    """The text encoder has the names of transformers 4.51, and the tokenizer has two files."""
    SPEC.write(tmp_path)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(weights).items()
    }
    assert {"visual.merger.mlp.0.weight", "model.norm.weight", "lm_head.weight"} <= renamed.keys()
    save_file(renamed, weights, metadata={"format": "pt"})
    tokens = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(tokens.read_text())
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    tokens.unlink()
    # Settings that later versions of the classes do not have.
    edit(tmp_path / "transformer" / "config.json", pooled_projection_dim=768)
    prompt, params = SPEC.requests[1]
    canvas = paint(load(tmp_path, SPEC, "float64"), prompt, params)
    assert difference(canvas, SPEC.paint_whole(prompt, params)) == 0.0


def test_a_single_step_is_refused_by_a_scheduler_that_ends_above_zero(tmp_path: Path) -> None:
    SPEC.write(tmp_path)
    prompt, params = SPEC.requests[0]
    model = load(tmp_path, SPEC, "float32")
    with pytest.raises(InvalidRequest) as refused:
        paint(model, prompt, msgspec.structs.replace(params, steps=1))
    assert refused.value.field == "image.steps"
    assert "1 is too few" in refused.value.message
    assert paint(model, prompt, msgspec.structs.replace(params, steps=2)).decode().isfinite().all()
