"""Reports about model folders: one that cannot be read has a reason, and no other suffers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shared.config.schema import ModelConfig
from shared.errors import ConfigError
from shared.models import registry
from workers.engine.model import check_folders
from workers.engine.model.check_folders import FolderReport
from workers.renderer.processing.processor import Processor

DEMO = Path(__file__).parents[3] / "ops" / "demo_model"


def test_a_model_that_is_served_has_no_reason() -> None:
    report = check_folders.examine(DEMO)
    assert (report.family, report.reason) == ("Qwen2-VL", None)
    assert report.kv_values_per_token > 0


@pytest.mark.parametrize("error", [ValueError(), KeyError(), ValueError("no\nsuch")])
def test_an_error_without_a_message_has_its_type(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    detail = "no" if error.args else type(error).__name__
    reason = f"config.json cannot be read: {detail}"
    assert check_folders.examine(DEMO) == FolderReport(reason=reason)


def test_an_error_after_the_configuration_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise KeyError("vision_config")

    monkeypatch.setattr(registry, "find_tower", fail)
    reason = "config.json cannot be read: there is no 'vision_config'"
    assert check_folders.examine(DEMO) == FolderReport(reason=reason)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the demo model, which sees."""
    folder = tmp_path / "copied"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("training"))
    return folder


def test_a_missing_processor_file_is_a_reason(copied: Path) -> None:
    (copied / "preprocessor_config.json").unlink()
    reason = check_folders.examine(copied).reason
    assert reason is not None
    assert reason.startswith("has no preprocessor_config.json, which states how images")
    # The files are not here while only the descriptions are downloaded.
    (copied / "tokenizer.json").unlink()
    assert check_folders.examine(copied).reason is None


def test_another_processor_than_the_familys_is_a_reason(copied: Path) -> None:
    file = copied / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    assert "CLIPImageProcessor" in (check_folders.examine(copied).reason or "")


def test_named_chat_templates_need_a_default(copied: Path) -> None:
    template = (copied / "chat_template.jinja").read_text()
    file = copied / "tokenizer_config.json"
    config = json.loads(file.read_text())
    named = [{"name": name, "template": template} for name in ("tool_use", "rag")]
    file.write_text(json.dumps(config | {"chat_template": named}))
    assert check_folders.examine(copied).reason is None
    (copied / "chat_template.jinja").unlink()
    reason = "has the chat templates rag, tool_use, and none for every chat: name one of them"
    assert reason in (check_folders.examine(copied).reason or "")
    with pytest.raises(ConfigError, match="none for every chat"):
        Processor(ModelConfig(str(copied)))
    additional = copied / "additional_chat_templates"
    additional.mkdir()
    (additional / "rag.jinja").write_text(template)
    assert "write the template for all other chats as chat_template.jinja" in (
        check_folders.examine(copied).reason or ""
    )
    shutil.rmtree(additional)
    named[0]["name"] = "default"
    file.write_text(json.dumps(config | {"chat_template": named}))
    assert check_folders.examine(copied).reason is None
    Processor(ModelConfig(str(copied)))
