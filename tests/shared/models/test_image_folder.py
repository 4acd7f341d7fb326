"""Folders of diffusers are described or refused by their small files, before anything is loaded."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ops.harness import qwen_images
from shared.errors import ConfigError
from shared.models.digest import digest_of_files
from shared.models.image_folder import (
    find_family_of,
    is_image_folder,
    list_missing_files,
    read_image_folder,
)
from shared.models.image_registry import list_image_families
from shared.stage.graphs import stages_of, writes_text
from workers.generator.image_loader import load_image_model

SHARD = "transformer/diffusion_pytorch_model-00003-of-00016.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen-image"
    qwen_images.write(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "changed"))


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a change of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def retype(dtype: str) -> Callable[[Path], None]:
    """Return a change of the type of the text encoder's tensors."""

    def change(folder: Path) -> None:
        file = folder / "text_encoder" / "model.safetensors"
        save_file({name: a.astype(dtype) for name, a in load_file(file).items()}, file)

    return change


def test_a_folder_is_described_without_torch(folder: Path) -> None:
    description = read_image_folder(folder)
    transformer = qwen_images.build_pipeline().transformer
    num_parameters = sum(parameter.numel() for parameter in transformer.parameters())
    assert description.family.name == "qwen-image"
    assert description.parts["transformer"].num_parameters == num_parameters
    assert description.num_bytes("transformer", "bfloat16") == 2 * num_parameters
    assert description.num_bytes("transformer", "float64") == 8 * num_parameters
    assert description.served_dtype("vae", "bfloat16") == "float32"
    assert description.served_dtype("vae", "float64") == "float64"
    assert list_missing_files(folder) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("model_index.json", _class_name="Flux2Pipeline"), "the pipeline 'Flux2Pipeline', wh"),
        (edit("model_index.json", _class_name=None), "the pipeline None, which is not supported"),
        (edit("model_index.json", vae=[None, None]), "a vae of None, whose code is not run"),
        (edit("model_index.json", vae="x"), "has no part 'vae' in model_index.json"),
        (edit("model_index.json", vae=["my_vae", "AutoencoderKLQwenImage"]), "of 'my_vae', whose"),
        (edit("model_index.json", vae=["diffusers", "AutoencoderKL"]), "class 'AutoencoderKL' in"),
        (edit("model_index.json", image_encoder=["transformers", "CLIP"]), "part 'image_encoder'"),
        (
            edit("vae/config.json", _class_name="AutoencoderKL"),
            "'AutoencoderKL' in vae/config.json",
        ),
        (edit("text_encoder/config.json", architectures=["Evil"]), "class 'Evil' in text_encoder/"),
        (edit("text_encoder/config.json", architectures=None), "class None in text_encoder/config"),
        (edit("tokenizer/tokenizer_config.json", tokenizer_class="T5Tokenizer"), "'T5Tokenizer'"),
        (edit("scheduler/scheduler_config.json", _class_name="DDIM"), "class 'DDIM' in scheduler"),
        (edit("transformer/config.json", quantization_config={"quant_method": "x"}), "'x'"),
        (remove("vae"), "lacks vae/config.json"),
        (remove("vae/diffusion_pytorch_model.safetensors"), "lacks vae/diffusion_pytorch_model.s"),
        (remove(SHARD), f"lacks {SHARD}"),
        (remove("scheduler"), "lacks scheduler/scheduler_config.json"),
        (retype("int8"), "type I8"),
        (remove("tokenizer/tokenizer.json"), "lacks tokenizer/tokenizer.json"),
        (write("tokenizer/tokenizer.json", ""), "a tokenizer/tokenizer.json that cannot be read"),
        (write("model_index.json", "{"), "cannot be read"),
        (write("vae/config.json", "[]"), "cannot be read"),
    ],
)
def test_other_folders_are_refused_by_what_is_wrong(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    with pytest.raises(ConfigError) as refused:
        read_image_folder(folder)
    assert message in refused.value.message
    assert refused.value.message.startswith(f"models.path: {folder}")
    assert "\n" not in refused.value.message
    with pytest.raises(ConfigError) as refused:
        load_image_model(folder, "float32", ["48x48"], "models.painter.stages.dit")
    assert message in refused.value.message
    assert refused.value.field == "models.painter.stages.dit.path"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("text_encoder/config.json", {"text_config": {"hidden_act": "x"}}, "'x'"),
        ("scheduler/scheduler_config.json", {"max_image_seq_len": 4}, "must be different"),
    ],
)
def test_settings_that_the_libraries_cannot_read_are_refused_in_one_sentence(
    folder: Path, name: str, values: dict[str, Any], message: str
) -> None:
    edit(name, **values)(folder)
    with pytest.raises(ConfigError) as refused:
        load_image_model(folder, "float32", ["48x48"], "models.painter.stages.dit")
    start = f"models.painter.stages.dit.path: {folder / name.partition('/')[0]}: "
    assert refused.value.message.startswith(start)
    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_missing_files_are_listed(folder: Path) -> None:
    remove(SHARD)(folder)
    remove("vae/config.json")(folder)
    assert list_missing_files(folder) == [SHARD, "vae/config.json"]


def test_without_the_extra_the_folder_is_refused_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"needs diffusers: pip install 'pagemill\[diffusers\]'"):
        read_image_folder(folder)


@pytest.mark.parametrize("package", ["sentencepiece", "google.protobuf"])
def test_a_tokenizer_of_sentencepiece_alone_needs_its_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in ("sentencepiece", "google", "google.protobuf"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, None if name == package else module)
    (folder / "tokenizer" / "spiece.model").touch()
    read_image_folder(folder)
    remove("tokenizer/tokenizer.json")(folder)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'pagemill\[diffusers\]'"):
        read_image_folder(folder)


def test_no_code_of_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w')\nclass Evil: pass\n"
    for part in ("", "tokenizer", "text_encoder", "transformer", "vae", "scheduler"):
        (folder / part / "evil.py").write_text(code)
    mapping = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer"), "evil.Evil")
    for file in ("tokenizer/tokenizer_config.json", "text_encoder/config.json"):
        edit(file, auto_map=mapping)(folder)
    edit("transformer/config.json", auto_map={"AutoModel": "evil.Evil"})(folder)
    load_image_model(folder, "float32", ["48x48"], "models.painter.stages.dit")
    assert not trace.exists()


def test_the_graph_of_each_family_paints_in_its_sizes() -> None:
    for family in list_image_families():
        graph: Any = family.name
        ((painter, _),) = stages_of(graph, "engine", ["dit"])
        assert tuple(painter.sizes) == family.sizes
        assert not writes_text(graph)
    assert stages_of(None, "engine", ["vae"]) == []
    assert writes_text("qwen3-omni")


def test_another_folder_is_not_taken_for_one_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_image_folder(tmp_path)
    assert find_family_of(tmp_path) is None


def test_the_digest_of_a_folder_changes_with_any_part(folder: Path) -> None:
    before = digest_of_files(folder)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: np.zeros_like(a) for name, a in load_file(file).items()}, file)
    assert digest_of_files(folder) != before
