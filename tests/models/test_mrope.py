"""Positions of images and videos: by the original rule, as transformers 4.57.1 had it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.models.registry import adapt
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import IMAGE, MARKS, VIDEO, build, make_case
from workers.engine.core.sequence import EngineRequest, Item

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "mrope_positions.json").read_text())
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    built: dict[str, Any] = {name: build(name) for name in FAMILIES}
    built["qwen2_5_vl"].config.vision_config.tokens_per_second = 2
    return built


def items_of(case: dict[str, Any]) -> list[Item]:
    """The items of a recorded prompt."""
    token_ids, items = case["token_ids"], []
    images, videos, seconds = (iter(case[n]) for n in ("image_grids", "video_grids", "seconds"))
    at = 0
    while at < len(token_ids):
        if token_ids[at] == IMAGE:
            grid = torch.tensor(next(images))
            length = int(grid.prod()) // 4
            placeholder = PlaceholderRange(at, length)
            items.append(Item("image", "i", placeholder, {"image_grid_thw": grid}))
        elif token_ids[at] == VIDEO:
            grid = torch.tensor(next(videos))
            fields = {"video_grid_thw": grid}
            length, is_embed = int(grid.prod()) // 4, None
            if case["family"] == "qwen3_vl":
                # Three tokens of text and two marks before each pair of frames but the first.
                length += 5 * (int(grid[0]) - 1)
                mask = sum(1 << i for i in range(length) if token_ids[at + i] == VIDEO)
                is_embed = mask.to_bytes(-(-length // 8), "little")
            if case["family"] == "qwen2_5_vl":
                fields["second_per_grid_ts"] = torch.tensor(next(seconds))
            items.append(Item("video", "v", PlaceholderRange(at, length, is_embed), fields))
        else:
            at += 1
            continue
        at += length
    return items


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["family"])
def test_positions_are_those_that_the_checkpoints_were_trained_with(
    models: dict[str, Any], case: dict[str, Any]
) -> None:
    items = items_of(case)
    request = EngineRequest("r", case["token_ids"], items, SamplingParams())
    located = adapt(models[case["family"]]).locate(request)
    assert located is not None
    assert located.prompt.tolist() == case["positions"]
    assert located.delta == case["delta"]


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_of_images_equal_the_positions_of_transformers(
    models: dict[str, Any], name: str
) -> None:
    model = copy.copy(models[name])
    sizes = [(60, 120), (140, 84), (56, 56), (28, 300)]
    for num in range(1, len(sizes) + 1):
        request = make_case("images", sizes[:num], num, 4).request
        token_ids = torch.tensor([request.prompt_token_ids])
        positions, delta = model.model.get_rope_index(
            token_ids,
            mm_token_type_ids=(token_ids == MARKS[1]).int(),
            image_grid_thw=torch.stack([item.fields["image_grid_thw"] for item in request.items]),
        )
        located = adapt(model).locate(request)
        assert located is not None
        assert torch.equal(located.prompt, positions[:, 0])
        assert located.delta == int(delta)


def test_a_fraction_of_a_position_is_cut_off_once(models: dict[str, Any]) -> None:
    """Two frames of 0.75 s at two positions a second are 1.5 positions apart."""
    fields = {
        "video_grid_thw": torch.tensor([4, 2, 2]),
        "second_per_grid_ts": torch.tensor(0.75),
    }
    item = Item("video", "v", PlaceholderRange(1, 4), fields)
    request = EngineRequest("r", [1, *[VIDEO] * 4, 2, 3], [item], SamplingParams())
    located = adapt(models["qwen2_5_vl"]).locate(request)
    assert located is not None
    assert located.prompt[0].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert located.prompt[1].tolist() == [0, 1, 1, 1, 1, 6, 7]
