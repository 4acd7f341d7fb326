"""Tokens that end an answer: all that the files of a model name, and a refusal where none does."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from tests import omni
from tests.engine.model.test_parity import build, changed_copy, folder
from workers.engine.end_tokens import read_end_tokens
from workers.engine.loader import LoadedModel, load
from workers.engine.model import check_folders

__all__ = ["folder"]  # a fixture

TALKER = {"talker_config": {"eos_token_id": 4, "text_config": {"eos_token_id": 4}}}


def read(
    folder: Path, tmp_path: Path, config: Any, generation: Any, *, is_codec: bool, **special: Any
) -> set[int]:
    """Return the end tokens of a folder with these files; `special` are the tokenizer's."""
    copied = changed_copy(folder, tmp_path, **config)
    (copied / "generation_config.json").unlink()
    if generation is not None:
        (copied / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(copied, **special)
    return set(read_end_tokens(copied, tokenizer, range(199), is_codec=is_codec))


@pytest.mark.parametrize(
    ("config", "generation", "special", "expected"),
    [
        ({"eos_token_id": 5}, {"temperature": 0.7}, {}, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 9]}, {}, {5, 7, 9}),
        ({"eos_token_id": [5, 6]}, None, {"eos_token": "w8"}, {5, 6, 8}),
        ({}, {"eos_token_id": 7}, {"eos_token": "w8"}, {7, 8}),
        ({}, None, {"eos_token": "w8"}, {8}),
        ({"text_config": {"eos_token_id": 4}}, None, {}, {4}),
        ({"thinker_config": {"text_config": {"eos_token_id": 4}}}, {}, {}, {4}),
        (TALKER, {"talker_eos_token_id": 4}, {"eos_token": "w8"}, {8}),
        ({"eos_token_id": 199}, {"eos_token_id": -1}, {"eos_token": "w8"}, {8}),
        ({}, {}, {}, set()),
    ],
)
def test_an_answer_ends_with_each_token_that_a_file_names(
    folder: Path, tmp_path: Path, config: Any, generation: Any, special: Any, expected: set[int]
) -> None:
    assert read(folder, tmp_path, config, generation, is_codec=False, **special) == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": 5}, {}, {5}),
        ({}, {}, {8}),
    ],
)
def test_codes_end_with_the_token_of_the_first_file(
    folder: Path, tmp_path: Path, config: Any, generation: Any, expected: set[int]
) -> None:
    settings = read(folder, tmp_path, config, generation, is_codec=True, eos_token="w8")
    assert settings == expected


def load_it(model: Path, **settings: Any) -> LoadedModel:
    config = ModelConfig(str(model), max_model_len=100)
    engine = EngineConfig(kv_cache_mib=64, kernels="torch")
    return load(msgspec.structs.replace(config, **settings), engine)


@pytest.mark.parametrize("write", [omni.write_qwen3, omni.write_qwen25])
def test_the_parts_of_an_omni_model_have_separate_end_tokens(tmp_path: Path, write: Any) -> None:
    """Their generation_config.json may name no end of the text; a talker ends with a code."""
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_it(tmp_path).eos_token_ids == {omni.IM_END}
    config = ModelConfig(str(tmp_path))
    talker = load(config, EngineConfig(kv_cache_mib=64, kernels="torch"), speaks=True)
    assert talker.talker is not None
    assert talker.eos_token_ids == talker.talker.end_token_ids
    assert omni.IM_END not in talker.eos_token_ids


def test_a_default_of_transformers_ends_no_answer(folder: Path, tmp_path: Path) -> None:
    """In the vocabulary of another model, its token is a word."""
    model, written = build("llama"), tmp_path / "llama"
    assert type(model.config)().eos_token_id == 2
    model.save_pretrained(written)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, written)
    (written / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((written / "config.json").read_text())
    del config["eos_token_id"]
    (written / "config.json").write_text(json.dumps(config))
    assert load_it(written).eos_token_ids == set()


@pytest.mark.parametrize("template", ["chat_template.jinja", "chat_template.json"])
def test_a_model_that_chats_without_an_end_token_is_refused(
    folder: Path, tmp_path: Path, template: str
) -> None:
    copied = changed_copy(folder, tmp_path)
    (copied / "generation_config.json").write_text("{}")
    assert load_it(copied).eos_token_ids == set()
    (copied / template).write_text('{"chat_template": "{{ messages }}"}')
    with pytest.raises(ConfigError, match=r"no end token.*eos_token_id") as refused:
        load_it(copied)
    assert refused.value.field == "models.path"
    # `pagemill models` and `up` report it before anything is loaded.
    assert "no end token" in (check_folders.examine(copied).reason or "")
    assert check_folders.examine(copied, "mean").reason is None
    # An embedding has no end.
    load_it(copied, pooling="mean")
    (copied / "modules.json").write_text('[{"type": "models.Transformer"}]')
    load_it(copied)
