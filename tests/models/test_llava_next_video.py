"""LLaVA-NeXT-Video: pixels as recorded from its processor, answers equal to `generate`."""

import copy
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig
from transformers.models.llava_next_video.configuration_llava_next_video import LlavaNextVideoConfig
from transformers.models.llava_next_video.modeling_llava_next_video import (
    LlavaNextVideoForConditionalGeneration,
)

from shared.codec.tensors import to_torch
from shared.codec.vllm_kwargs import decode_item, encode_item
from shared.errors import ConfigError, InvalidRequest
from shared.models.families.llava_next_video import FAMILIES, LlavaNextVideoLayout
from shared.models.frames import resize_frame
from shared.models.media import VideoProbe
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.multimodal import VIDEO, FrameSampling, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import TEXT, Case, RandomSchedule, Twins, run_schedule, widen
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.model.flat_model import FlatModel

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "video_pixels.json").read_text())
CASES = [case for case in RECORDED["cases"] if case["kind"] == "llava"]
SETTINGS = CASES[0]["settings"]
VIDEO_ID, SIDE = 190, 56


def make_config(**changed: Any) -> LlavaNextVideoConfig:
    clip = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=14,
    )
    ids = {"image_token_index": 191, "video_token_index": VIDEO_ID}
    return LlavaNextVideoConfig(
        vision_config=clip, text_config=LlamaConfig(**TEXT), **{**ids, **changed}
    )


def open_layout(folder: Path, config: Any = None, **settings: Any) -> LlavaNextVideoLayout:
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps({**SETTINGS, **settings}))
    layout = FAMILIES[0].media[VIDEO].open_layout(folder, config or make_config())
    assert isinstance(layout, LlavaNextVideoLayout)
    return layout


def noise(num: int, height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["frames"]))
def test_pixels_equal_the_processors_bit_for_bit(tmp_path: Path, case: Any) -> None:
    layout = open_layout(tmp_path)
    num, height, width = case["frames"]
    frames = noise(num, height, width, case["seed"])
    plan = layout.plan(
        VideoProbe(num, 1.0, width, height, is_sequence=True), FrameSampling(), "field"
    )
    fields, num_tokens = layout.pack((resize_frame(f, plan) for f in frames), plan, "field")
    pixels, table = to_torch(fields["pixels"]), to_torch(fields["pixel_table"])
    values = torch.stack([table[c][pixels[:, c].long()] for c in range(3)], 1).contiguous()
    assert list(values.shape) == case["shape"]
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == case["sha256"]
    assert num_tokens == plan.num_tokens == 4 * num
    data = encode_item(layout.to_wire(fields))
    received, received_tokens = layout.from_wire(decode_item(data, "field"), "field")
    assert received_tokens == num_tokens
    own, again = (
        to_torch(f["pixel_table"])[0][to_torch(f["pixels"])[:, 0].long()]
        for f in (fields, received)
    )
    assert torch.equal(own, again)


def test_the_size_of_patches_is_in_the_fingerprint(tmp_path: Path) -> None:
    config = make_config()
    prints = {open_layout(tmp_path, config).fingerprint}
    config.vision_config.patch_size = 7
    prints.add(open_layout(tmp_path, config).fingerprint)
    assert len(prints) == 2


def test_eight_frames_are_taken_from_the_first_to_the_last(tmp_path: Path) -> None:
    layout = open_layout(tmp_path)
    for total, sampling, expected in (
        (100, FrameSampling(), np.linspace(0, 99, 8)),
        (5, FrameSampling(), np.arange(5)),
        (100, FrameSampling(num_frames=3), [0, 49, 99]),
        (100, FrameSampling(fps=0.5), np.linspace(0, 99, 5)),
        (100, FrameSampling(max_frames=2), [0, 99]),
    ):
        plan = layout.plan(VideoProbe(total, 10.0, 100, 60), sampling, "field")
        assert list(plan.indexes) == np.array(expected).astype(int).tolist()


@pytest.fixture(scope="module")
def twins() -> Twins:
    torch.manual_seed(0)
    model = LlavaNextVideoForConditionalGeneration(make_config()).eval().requires_grad_(False)
    widen(model)
    family = adapt(copy.deepcopy(model))
    assert family.tower is not None
    return Twins(model, FlatModel(family), Tower(family.tower, family.model))


def make_request(layout: LlavaNextVideoLayout, name: str, *nums: int) -> EngineRequest:
    token_ids, items = [3, 4, 5], []
    for i, num in enumerate(nums):
        plan = layout.plan(VideoProbe(num, 1.0, 90, 60, is_sequence=True), FrameSampling(), "f")
        frames = noise(num, 60, 90, i)
        fields, count = layout.pack((resize_frame(f, plan) for f in frames), plan, "f")
        tensors = {key: to_torch(tensor) for key, tensor in fields.items()}
        items.append(Item(VIDEO, f"{i} {num}", PlaceholderRange(len(token_ids), count), tensors))
        token_ids += [VIDEO_ID] * count + [7 + i, 9]
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    return EngineRequest(name, token_ids, items, sampling)


def test_answers_equal_the_answers_of_generate(twins: Twins, tmp_path: Path) -> None:
    layout = open_layout(tmp_path)
    assert twins.tower is not None
    restore: Any = getattr(twins.tower.adapter, "restore")  # noqa: B009
    reference: Any = twins.reference
    requests = [make_request(layout, "one", 4), make_request(layout, "two", 3, 3)]
    expected = {}
    for request in requests:
        token_ids = torch.tensor([request.prompt_token_ids])
        answer = reference.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            pixel_values_videos=torch.stack([restore(item.fields) for item in request.items]),
            do_sample=False,
            min_new_tokens=10,
            max_new_tokens=10,
            pad_token_id=0,
        )
        expected[request.request_id] = answer[0, token_ids.shape[1] :].tolist()
        assert len(set(expected[request.request_id])) > 3
    cases = [Case(request, []) for request in requests]
    for chunk, share in ((100, 0.0), (7, 0.08)):
        schedule = RandomSchedule(random.Random(chunk), 64, 4, chunk, share)
        assert run_schedule(twins, cases, schedule) == expected


def test_a_video_is_split_between_its_frames(twins: Twins, tmp_path: Path) -> None:
    tower = twins.tower
    assert tower is not None
    fields = make_request(open_layout(tmp_path), "one", 5).items[0].fields
    parts = tower.adapter.split(fields, 8)
    assert [tower.adapter.count(part) for part in parts] == [8, 8, 4]
    whole = tower.adapter.encode(tower.model, [fields])[0]
    torch.testing.assert_close(torch.cat(tower.adapter.encode(tower.model, parts)), whole)


def test_unsupported_settings_are_refused(twins: Twins, tmp_path: Path) -> None:
    for settings in (
        {"size": {"shortest_edge": 64}},
        {"crop_size": {"height": 56, "width": 28}},
        {"do_center_crop": False},
    ):
        with pytest.raises(ConfigError, match="squares of 56"):
            open_layout(tmp_path, **settings)
    changes: list[dict[str, Any]] = [
        {"spatial_pool_stride": 4},
        {"spatial_pool_mode": "conv"},
        {"vision_feature_select_strategy": "full"},
    ]
    for changed in changes:
        with pytest.raises(ConfigError, match="LLaVA-NeXT-Video is supported"):
            open_layout(tmp_path, make_config(**changed))
    request = make_request(open_layout(tmp_path), "one", 2)
    [item] = request.items
    for pixels in (item.fields["pixels"][:0], item.fields["pixels"][:, :, 1:]):
        fields = {**item.fields, "pixels": pixels}
        with pytest.raises(InvalidRequest):
            twins.served.family.check(replace(request, items=[replace(item, fields=fields)]))
