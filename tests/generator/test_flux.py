"""Folders of FLUX.1 as they were published, and FLUX.1 [schnell]."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError, ContextTooLong, InvalidRequest
from shared.models.image_folder import find_family_of, list_missing_files, read_image_folder
from shared.protocol.images import PaintParams
from shared.stage.graphs import graph_of_folder
from tests.generator.pipelines import flux
from tests.generator.test_pipelines import copy_of, difference, edit, load, paint
from workers.generator.core.denoising import check_guidance

PROMPT, PARAMS = flux.SPEC.requests[0]


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dev"
    flux.write(folder)
    return folder


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "schnell"
    flux.write(folder, is_guided=False)
    return folder


def test_schnell_is_another_family_of_the_same_pipeline(
    dev: Path, schnell: Path, tmp_path: Path
) -> None:
    assert (graph_of_folder(dev), graph_of_folder(schnell)) == ("flux.1-dev", "flux.1-schnell")
    family = read_image_folder(schnell).family
    assert (family.steps, family.guidance, family.max_prompt_tokens) == (4, 0.0, 256)
    (copy_of(schnell, tmp_path) / "transformer" / "config.json").unlink()
    assert list_missing_files(tmp_path / "changed") == ["transformer/config.json"]
    with pytest.raises(ConfigError, match=r"lacks transformer/config\.json"):
        read_image_folder(tmp_path / "changed")


def test_schnell_paints_as_its_pipeline_and_refuses_what_has_no_effect(schnell: Path) -> None:
    model = load(schnell, flux.SPEC, "float64")
    params = msgspec.structs.replace(PARAMS, guidance=0.0)
    whole = flux.paint_whole(PROMPT, params, is_guided=False)
    check_guidance(model, params)
    assert difference(paint(model, PROMPT, params), whole) == 0.0
    with pytest.raises(InvalidRequest) as refused:
        check_guidance(model, PARAMS)
    assert refused.value.field == "image.guidance"
    assert refused.value.message == (
        "image.guidance: 3 has no effect, because this model paints without guidance; remove it or"
        " set 0"
    )
    longest = "a" * 255
    assert model.check_text(longest, "prompt") == 256
    with pytest.raises(ContextTooLong, match="257 tokens, over the model's limit of 256"):
        model.check_text(longest + "a", "prompt")


def test_guidance_of_zero_is_a_number_like_others_for_dev(dev: Path) -> None:
    model = load(dev, flux.SPEC, "float32")
    for guidance in (0.0, 1.0, 3.5):
        check_guidance(model, PaintParams("48x48", guidance=guidance))


def test_files_as_they_were_published_are_read(dev: Path, tmp_path: Path) -> None:
    """Published folders have older names, several files of T5, and vocabularies of CLIP."""
    folder = copy_of(dev, tmp_path)
    rename_clip(folder / "text_encoder")
    edit(folder / "text_encoder" / "config.json", architectures=["CLIPTextModel"], eos_token_id=2)
    split_tokenizer(folder / "tokenizer")
    edit(folder / "tokenizer_2" / "tokenizer_config.json", tokenizer_class="T5Tokenizer")
    t5 = flux.build_pipeline(torch.float32).text_encoder_2
    (folder / "text_encoder_2" / "model.safetensors").unlink()
    t5.save_pretrained(folder / "text_encoder_2", max_shard_size="20KB")
    edit(
        folder / "model_index.json",
        image_encoder=[None, None],
        feature_extractor=[None, None],
        tokenizer_2=["transformers", "T5TokenizerFast"],
    )
    family = find_family_of(folder)
    assert family is not None
    canvas = paint(load(folder, flux.SPEC, "float64"), PROMPT, PARAMS)
    assert difference(canvas, flux.paint_whole(PROMPT, PARAMS)) == 0.0


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer", {"model_max_length": 10**30}, "is over the limit of 4096"),
        ("tokenizer_2", {"pad_token": None}, "pad_token is missing"),
    ],
)
def test_tokenizers_without_a_length_or_padding_are_refused(
    dev: Path, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    folder = copy_of(dev, tmp_path)
    edit(folder / file / "tokenizer_config.json", **values)
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder, flux.SPEC, "float32")
    assert str(folder / file) in refused.value.message


def rename_clip(folder: Path) -> None:
    """Give the weights of CLIP the names of transformers 4."""
    weights = folder / "model.safetensors"
    renamed = {
        f"text_model.{name.removeprefix('text_model.')}": tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(renamed, weights, metadata={"format": "pt"})


def split_tokenizer(folder: Path) -> None:
    """Replace `tokenizer.json` by the two files of published tokenizers of CLIP."""
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer.json").unlink()
