"""Reports about model folders: one that cannot be read has a reason, and no other suffers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shared.models import registry
from workers.engine.model import check_folders
from workers.engine.model.check_folders import FolderReport

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
    reason = "config.json cannot be read: 'vision_config'"
    assert check_folders.examine(DEMO) == FolderReport(reason=reason)
