"""Folders of Z-Image as they were published."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.generator.pipelines.z_image import SPEC
from tests.generator.test_pipelines import difference, edit, load, paint


def test_files_as_they_were_published_are_read(tmp_path: Path) -> None:
    """The text encoder has the names and the class of a whole language model."""
    SPEC.write(tmp_path)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    renamed = {f"model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    edit(tmp_path / "text_encoder" / "config.json", architectures=["Qwen3ForCausalLM"])
    prompt, params = SPEC.requests[1]
    canvas = paint(load(tmp_path, SPEC, "float64"), prompt, params)
    assert difference(canvas, SPEC.paint_whole(prompt, params)) == 0.0
