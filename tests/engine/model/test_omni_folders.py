"""Folders of omni models as hubs have them: each stage serves them, or names the file and field."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from tests import omni
from workers.engine.loader import load
from workers.engine.model.check_folders import examine
from workers.generator.loader import load_vocoder

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"
QUERY = "thinker.model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "qwen3"
    omni.write_qwen3(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def start(folder: Path, stage: str) -> None:
    if stage == "code2wav":
        load_vocoder(folder, ChunkSpec(left=25, right=1), "stages.code2wav")
    else:
        engine = EngineConfig(num_blocks=128, block_size=8, kernels="torch")
        load(ModelConfig(str(folder)), engine, speaks=stage == "talker")


def refusal(folder: Path, stage: str) -> str:
    with pytest.raises(ConfigError) as refused:
        start(folder, stage)
    assert "\n" not in refused.value.message
    return refused.value.message


def setting(path: str, value: Any) -> Change:
    """Change a value of config.json; `...` removes it."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = section = json.loads(file.read_text())
        *parents, key = path.split(".")
        for parent in parents:
            section = section[parent]
        if value is ...:
            del section[key]
        else:
            section[key] = value
        file.write_text(json.dumps(config))

    return change


def keep_weights(*prefixes: str, cut: int = 0) -> Change:
    """Keep the weights with these prefixes, and cut off the first characters of their names."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        kept = {name[cut:]: weights[name] for name in weights if name.startswith(prefixes)}
        save_file(kept, folder / WEIGHTS, {"format": "pt"})

    return change


def header(name: str, **fields: Any) -> Change:
    """Change the header of a tensor, and none of its bytes."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        tensors = json.loads(content[8 : 8 + length])
        tensors[name].update(fields)
        encoded = json.dumps(tensors).encode()
        start = struct.pack("<Q", len(encoded))
        (folder / WEIGHTS).write_bytes(start + encoded + content[8 + length :])

    return change


def content(name: str, text: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(text)

    return change


def shard(folder: Path) -> None:
    model = omni.transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="300KB")
    assert (folder / f"{WEIGHTS}.index.json").is_file()


def add_files(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "consolidated.safetensors")
    for name in ("spk_dict.pt", "modeling.py", "README.md"):
        (folder / name).write_text("raise SystemExit")


def remove_optional(folder: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink()


def rename_dtype(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"dtype"', '"torch_dtype"'))


SERVED: dict[str, Change] = {
    "shards": shard,
    "other files": add_files,
    "optional files": remove_optional,
    "torch_dtype": rename_dtype,
    "a dtype of null": setting("dtype", None),
}


# The names of a setting concern no other file.
ALWAYS = {"shards", "other files", "optional files"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in SERVED],
)
def test_each_stage_serves_the_folder(folder: Path, name: str) -> None:
    SERVED[name](folder)
    assert examine(folder).reason is None
    for stage in ("engine", "talker", "code2wav"):
        start(folder, stage)


@pytest.mark.parametrize("has_setting", [False, True])
def test_a_folder_without_a_talker_answers_by_text(folder: Path, has_setting: bool) -> None:
    keep_weights("thinker")(folder)
    if has_setting:
        setting("enable_audio_output", False)(folder)
    else:
        setting("talker_config", ...)(folder)
        setting("code2wav_config", ...)(folder)
    report = examine(folder)
    assert (report.reason, report.talker) == (None, None)
    start(folder, "engine")
    assert "has no talker: its config.json lacks talker_config" in refusal(folder, "talker")


def test_a_talker_without_weights_is_named(folder: Path) -> None:
    keep_weights("thinker")(folder)
    start(folder, "engine")
    assert "lacks weights: talker." in refusal(folder, "talker")
    assert "lacks weights: code_embedding.weight" in refusal(folder, "code2wav")


@pytest.mark.parametrize("cut", [0, len("thinker.")])
def test_the_folder_of_a_thinker_alone_is_served(folder: Path, cut: int) -> None:
    keep_weights("thinker", cut=cut)(folder)
    config = json.loads((folder / "config.json").read_text())["thinker_config"]
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"feature_extractor_type": "WhisperFeatureExtractor"}
    file.write_text(json.dumps(settings))
    report = examine(folder)
    assert (report.family, report.reason) == ("Qwen3-Omni", None)
    start(folder, "engine")


REFUSED: dict[str, tuple[Change, str, str]] = {
    "no sizes": (setting("thinker_config", None), "engine", "config.json describes 17201485816"),
    "no sizes of ears": (
        setting("thinker_config.audio_config", None),
        "engine",
        "config.json describes 650001440 parameters, and the files have 651969",
    ),
    "a null": (
        setting("talker_config.accept_hidden_layer", None),
        "engine",
        "Field 'accept_hidden_layer' expected int, got NoneType",
    ),
    "a layer beyond the last": (
        setting("talker_config.accept_hidden_layer", 7),
        "talker",
        "talker_config.accept_hidden_layer: 7, which must be 1 to 3",
    ),
    "a layer before the first": (
        setting("talker_config.accept_hidden_layer", -1),
        "talker",
        "talker_config.accept_hidden_layer: -1, which must be 1 to 3",
    ),
    "no voices": (
        setting("talker_config.speaker_id", None),
        "talker",
        "talker_config.speaker_id.: None, which must be 0 to",
    ),
    "a voice beyond the table": (
        setting("talker_config.speaker_id", {"ethan": 99_999}),
        "talker",
        "talker_config.speaker_id.ethan: 99999, which must be 0 to",
    ),
    "a token beyond the vocabulary": (
        setting("tts_pad_token_id", 10**6),
        "talker",
        "config.json has tts_pad_token_id: 1000000, which must be 0 to 799",
    ),
    "an end that is no code": (
        setting("talker_config.codec_eos_token_id", 10**6),
        "talker",
        "talker_config.codec_eos_token_id: 1000000, which must be 0 to",
    ),
    "other codebooks": (
        setting("talker_config.num_code_groups", 9),
        "talker",
        "talker_config.num_code_groups: 9, which must be 4",
    ),
    "a shape that lies": (
        header(QUERY, shape=[64, 65]),
        "engine",
        f"{WEIGHTS} is not a safetensors file: {QUERY} has 16384 bytes, which do not fit its type"
        " F32 and its shape [64, 65]",
    ),
    "a type that lies": (header(QUERY, dtype="F64"), "talker", f"{QUERY} has 16384 bytes"),
    "bytes beyond the file": (
        header(QUERY, data_offsets=[0, 10**9]),
        "code2wav",
        f"{WEIGHTS} is not a safetensors file: {QUERY} has the bytes 0 to 1000000000",
    ),
    "a pointer": (
        content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "engine",
        f"{WEIGHTS} is not a safetensors file: it is a pointer of Git LFS",
    ),
    "an empty file": (content(WEIGHTS, b""), "engine", f"{WEIGHTS} is not a safetensors file"),
    "another tokenizer file": (
        content("tokenizer.json", b"{}"),
        "engine",
        "tokenizer.json cannot be read: there is no 'added_tokens'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_file_and_the_field(folder: Path, name: str) -> None:
    change, stage, reason = REFUSED[name]
    change(folder)
    assert reason in refusal(folder, stage)


@pytest.mark.parametrize("name", ["a shape that lies", "bytes beyond the file", "a pointer"])
def test_files_of_weights_are_checked_before_the_start(folder: Path, name: str) -> None:
    change, _, reason = REFUSED[name]
    change(folder)
    assert reason in (examine(folder).reason or "")


def test_a_truncated_file_is_named_before_the_start(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{WEIGHTS} is not a safetensors file" in (examine(folder).reason or "")
    assert f"{WEIGHTS} is not a safetensors file" in refusal(folder, "engine")


@pytest.mark.parametrize("text", [b"[]", b"{"])
def test_a_processor_file_that_cannot_be_read_is_named(folder: Path, text: bytes) -> None:
    (folder / "preprocessor_config.json").write_bytes(text)
    assert "preprocessor_config.json cannot be read" in (examine(folder).reason or "")
