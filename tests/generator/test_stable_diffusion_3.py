"""Folders of Stable Diffusion 3.5, and folders without T5 or with files as they were published."""

from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError, ContextTooLong
from shared.models.image_folder import list_missing_files, read_image_folder
from tests.generator.pipelines import stable_diffusion_3
from tests.generator.test_flux import split_tokenizer
from tests.generator.test_pipelines import KEY, copy_of, difference, edit, load, paint

SPEC = stable_diffusion_3.SPEC
PROMPT, PARAMS = SPEC.requests[0]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "later"
    stable_diffusion_3.write(folder, is_later=True)
    return folder


def test_later_layers_and_shifts_without_t5_paint_as_their_pipeline(later: Path) -> None:
    assert list_missing_files(later) == []
    assert "text_encoder_3" not in read_image_folder(later).parts
    model = load(later, SPEC, "float64")
    for prompt, params in SPEC.requests[:4]:
        whole = stable_diffusion_3.paint_whole(prompt, params, is_later=True)
        assert difference(paint(model, prompt, params), whole) == 0.0


def test_without_t5_a_text_over_the_limit_of_clip_is_refused(later: Path) -> None:
    model = load(later, SPEC, "float64")
    # The ends of the text have tokens, too.
    longest = "a" * 75
    assert model.check_text(longest, "prompt") == 77
    with pytest.raises(ContextTooLong, match="78 tokens, over the model's limit of 77"):
        model.check_text(longest + "a", "prompt")
    whole = stable_diffusion_3.paint_whole(longest, PARAMS, is_later=True)
    assert difference(paint(model, longest, PARAMS), whole) == 0.0


def test_t5_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    SPEC.write(tmp_path)
    edit(tmp_path / "model_index.json", tokenizer_3=[None, None])
    with pytest.raises(ConfigError, match="has a part 'text_encoder_3' without 'tokenizer_3'"):
        read_image_folder(tmp_path)


def test_files_as_they_were_published_are_read(tmp_path: Path) -> None:
    """Published folders have a second set of files in float16, and several files of T5."""
    SPEC.write(tmp_path)
    for name in ("tokenizer", "tokenizer_2"):
        split_tokenizer(tmp_path / name)
    encoder = stable_diffusion_3.build_pipeline(torch.float32).text_encoder_3
    (tmp_path / "text_encoder_3" / "model.safetensors").unlink()
    encoder.save_pretrained(tmp_path / "text_encoder_3", max_shard_size="20KB")
    (tmp_path / "text_encoder" / "model.fp16.safetensors").write_bytes(b"not read")
    (tmp_path / "text_encoder_3" / "model.safetensors.index.fp16.json").write_bytes(b"not read")
    edit(tmp_path / "model_index.json", tokenizer_3=["transformers", "T5TokenizerFast"])
    canvas = paint(load(tmp_path, SPEC, "float64"), PROMPT, PARAMS)
    assert difference(canvas, stable_diffusion_3.paint_whole(PROMPT, PARAMS)) == 0.0


def test_weights_of_another_shape_are_refused(later: Path, tmp_path: Path) -> None:
    folder = copy_of(later, tmp_path)
    edit(folder / "transformer" / "config.json", joint_attention_dim=48)
    with pytest.raises(ConfigError) as refused:
        load(folder, SPEC, "float32")
    assert refused.value.message == (
        f"{KEY}.path: {folder}/transformer/diffusion_pytorch_model.safetensors:"
        " context_embedder.weight has the shape [32, 32], but config.json requires [32, 48]"
    )
