"""The model of a command without --model: the only one that can do what is asked."""

from collections.abc import Callable
from typing import Any

import pytest

from shared.config.parsing import parse_config
from shared.config.schema import Config
from shared.errors import InvalidRequest
from workers.cli.commands.painting import find_painter
from workers.cli.options import find_writer
from workers.cli.sound import find_audio

MODELS = {
    "painter": "{path: a, graph: qwen-image}",
    "editor": "{path: b, graph: qwen-image-edit}",
    "film": "{path: c, graph: wan}",
    "writer": "{path: d}",
    "omni": "{path: e, graph: qwen3-omni}",
    "voice": "{path: f, graph: orpheus, stages: {code2wav: {path: g}}}",
    "tenor": "{path: h, graph: orpheus, stages: {code2wav: {path: g}}}",
}


def config_of(*names: str) -> Config:
    lines = "".join(f"  {name}: {MODELS[name]}\n" for name in names)
    return parse_config(f"models:\n{lines}", {}, "test")


@pytest.mark.parametrize(
    ("find", "names", "chosen"),
    [
        (find_writer, ("painter", "voice", "writer"), "writer"),
        (find_writer, ("film", "omni"), "omni"),
        (lambda c: find_writer(c, {"omni", "other"}), ("writer", "omni"), "omni"),
        (lambda c: find_writer(c, {"other", "voice"}), ("writer", "voice"), "other"),
        (lambda c: find_painter(c, None)[0], ("writer", "editor", "painter"), "painter"),
        (lambda c: find_painter(c, None)[0], ("film", "painter"), "painter"),
        (lambda c: find_painter(c, None)[0], ("writer", "film"), "film"),
        (lambda c: find_painter(c, None, edits=True)[0], ("painter", "editor"), "editor"),
        (lambda c: find_painter(c, None, makes_video=True)[0], ("painter", "film"), "film"),
        (lambda c: find_audio(c, None, text_given=True)[0], ("writer", "voice"), "voice"),
        (lambda c: find_audio(c, None)[0], ("writer", "omni"), "omni"),
        # Orpheus writes no text of an answer.
        (lambda c: find_audio(c, None)[0], ("voice", "omni"), "omni"),
    ],
)
def test_the_model_is_the_only_one_that_can(
    find: Callable[[Config], Any], names: tuple[str, ...], chosen: str
) -> None:
    assert find(config_of(*names)) == chosen


@pytest.mark.parametrize(
    ("find", "names", "message"),
    [
        (find_writer, ("painter", "voice"), "no configured model can write text"),
        (find_writer, ("writer", "omni"), "several models can write text: writer, omni"),
        (
            lambda c: find_writer(c, ["b", "a"]),
            ("writer",),
            "several models can write text: a, b",
        ),
        (lambda c: find_painter(c, None), ("writer",), "no configured model can paint a text"),
        (
            lambda c: find_painter(c, None, edits=True),
            ("painter",),
            "no configured model can edit images",
        ),
        (
            lambda c: find_audio(c, None, text_given=True),
            ("voice", "tenor"),
            "several models can speak: voice, tenor",
        ),
        (lambda c: find_audio(c, "writer"), ("writer",), "writer has no output of sound"),
        (lambda c: find_painter(c, "writer"), ("writer",), "writer has no output of images"),
    ],
)
def test_none_and_several_are_refused(
    find: Callable[[Config], Any], names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        find(config_of(*names))
    assert message in refused.value.message
    assert refused.value.field == "model"
