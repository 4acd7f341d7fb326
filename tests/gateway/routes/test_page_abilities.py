"""The files that the web page offers to send, by the model."""

from pathlib import Path

import pytest

from shared.config.schema import ModelConfig
from workers.gateway.routes.page import accepted_files
from workers.settings import DEMO_MODEL, OPS


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (ModelConfig(str(DEMO_MODEL)), ["image", "video", "document"]),
        (ModelConfig(str(DEMO_MODEL), max_images=0), ["video"]),
        (ModelConfig(str(OPS / "demo_hearing"), max_images=0, max_videos=0), ["audio"]),
        # Its renderer refuses what the model does not read.
        (ModelConfig("elsewhere"), ["image", "video", "audio", "document"]),
    ],
)
def test_files_are_offered_by_the_abilities_of_the_model(
    model: ModelConfig, kinds: list[str]
) -> None:
    assert accepted_files(model) == kinds


def test_a_model_of_text_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    assert accepted_files(ModelConfig(str(tmp_path))) == []
