"""Sampling defaults of a folder's generation_config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from workers.generation_config import read_sampling_defaults
from workers.settings import DEMO_MODEL, load_config

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 7}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("stated", "defaults"),
    [
        ({"eos_token_id": 7, "max_new_tokens": 64}, {}),
        (SAMPLED, DEFAULTS),
        ({"temperature": 0.01}, {"temperature": 0.01}),
        ({"temperature": None, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
        ),
    ],
)
def test_the_file_states_defaults(
    stated: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert read_sampling_defaults(tmp_path) == defaults


@pytest.mark.parametrize("text", ['{"temperature": 5}', '{"top_k": "many"}', "[]", "{"])
def test_a_file_that_no_request_could_follow_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        read_sampling_defaults(tmp_path)


def test_a_written_configuration_asks_for_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("training"))
    (folder / "generation_config.json").write_text(json.dumps(SAMPLED))
    file = tmp_path / "pagemill.yaml"

    def defaults_with(settings: str) -> dict[str, Any]:
        file.write_text(f"models: {{mine: {{path: model, {settings}}}}}")
        return load_config(file).models["mine"].sampling_defaults

    assert defaults_with("generation_config: false") == {}
    assert defaults_with("generation_config: true") == DEFAULTS
    own = "sampling_defaults: {temperature: 0.2, max_tokens: 9}, generation_config: true"
    assert defaults_with(own) == DEFAULTS | {"temperature": 0.2, "max_tokens": 9}
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"models\.mine\.generation_config: there is no"):
        load_config(file)
