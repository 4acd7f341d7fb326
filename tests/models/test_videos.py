"""Answers about videos equal the answers of transformers' forward, token for token.

`generate` of transformers gives wrong positions to the text after a video. Its forward therefore
gets the positions of the original rule, which tests/models/test_mrope.py checks on a recording.
"""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.codec.tensors import to_torch
from shared.errors import InvalidRequest, RequestError
from shared.models.frames import resize_frame
from shared.models.media import VideoProbe
from shared.models.qwen_video import Qwen3VideoLayout, Qwen25VideoLayout, QwenVideoLayout
from shared.models.tower import Tower
from shared.protocol.multimodal import VIDEO as VIDEO_MODALITY
from shared.protocol.multimodal import FrameSampling, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import IMAGE as IMAGE_ID
from tests.engine.model.test_parity import (
    NUM_TEXT_IDS,
    VIDEO,
    VISION_END,
    VISION_START,
    Case,
    RandomSchedule,
    Twins,
    draw_image,
    item_of,
    make_case,
    make_twins,
    run_core,
    run_schedule,
)
from workers.engine.core.sequence import Batch, EngineRequest, Item, ScheduledSequence, Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {
    "qwen2_vl": QwenVideoLayout,
    "qwen2_5_vl": Qwen25VideoLayout,
    "qwen3_vl": Qwen3VideoLayout,
}
SETTINGS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 84 * 40}, "patch_size": 14}
MAX_TOKENS = 10


@dataclass(frozen=True)
class Model:
    twins: Twins
    layout: QwenVideoLayout


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    twins = make_twins(request.param)
    layout = LAYOUTS[request.param].open(folder, twins.reference.config)
    assert layout is not None
    return Model(twins, layout)


@dataclass(frozen=True)
class Clip:
    num_frames: int
    width: int = 84
    height: int = 56
    fps: float = 2.0


Content = int | Clip | tuple[int, int]
"""Some words, a video or an image."""


def make_prompt(model: Model, name: str, *contents: Content) -> EngineRequest:
    rng = np.random.default_rng(sum(name.encode()))
    token_ids: list[int] = []
    items: list[Item] = []
    for i, content in enumerate(contents):
        if isinstance(content, int):
            token_ids += rng.integers(0, NUM_TEXT_IDS, content).tolist()
        elif isinstance(content, Clip):
            item, ids = video_item(model.layout, content, len(token_ids), seed=i)
            items.append(item)
            token_ids += ids
        else:
            items.append(item_of(draw_image(i, *content), len(token_ids) + 1))
            run = [IMAGE_ID] * items[-1].placeholder.length
            token_ids += [VISION_START, *run, VISION_END]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return EngineRequest(name, token_ids, items, sampling)


def video_item(
    layout: QwenVideoLayout, clip: Clip, offset: int, seed: int
) -> tuple[Item, list[int]]:
    """Return the item of a video of noise, and its tokens with the marks around them."""
    rng = np.random.default_rng(seed)
    shape = (clip.num_frames, clip.height, clip.width, 3)
    frames = rng.integers(0, 256, shape, dtype=np.uint8)
    probe = VideoProbe(clip.num_frames, clip.fps, clip.width, clip.height, is_sequence=True)
    plan = layout.plan(probe, FrameSampling(max_frames=64), "field")
    fields, num = layout.pack((resize_frame(f, plan) for f in frames), plan, "field")
    placement = layout.place(fields, lambda text: [ord(c) % NUM_TEXT_IDS for c in text])
    if placement is None:
        ids, placeholder = [VIDEO] * num, PlaceholderRange(offset + 1, num)
    else:
        ids = placement.token_ids
        placeholder = PlaceholderRange(offset + 1, len(ids), placement.is_embed())
    tensors = {name: to_torch(tensor) for name, tensor in fields.items()}
    item = Item(VIDEO_MODALITY, f"{clip} {seed}", placeholder, tensors)
    if placement is not None:
        assert placement.marks == (VISION_START, VISION_END)
        return replace(item, placeholder=replace_offset(placeholder, -1)), ids
    return item, [VISION_START, *ids, VISION_END]


def expected_answer(twins: Twins, request: EngineRequest) -> list[int]:
    """Return the greedy tokens of transformers' forward, which computes all of it at each step."""
    assert twins.tower is not None
    reference: Any = twins.reference
    restore: Any = getattr(twins.tower.adapter, "restore")  # noqa: B009
    inputs: dict[str, Any] = {}
    for modality, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        fields = [item.fields for item in request.items if item.modality == modality]
        if fields:
            inputs[pixels] = torch.cat([restore(item) for item in fields])
            inputs[grids] = torch.stack([item[grids] for item in fields])
    located = twins.served.family.locate(request)
    token_ids = torch.tensor([request.prompt_token_ids])
    num_tokens = token_ids.shape[1]
    delta: float = 0
    positions = torch.arange(num_tokens).expand(3, -1)
    if located is not None:
        positions, delta = located.prompt, located.delta
    inputs["mm_token_type_ids"] = (token_ids == IMAGE_ID).int() + 2 * (token_ids == VIDEO).int()
    answer: list[int] = []
    cache = None
    for i in range(MAX_TOKENS):
        output = reference(
            input_ids=token_ids,
            attention_mask=torch.ones(1, num_tokens + i, dtype=torch.long),
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
            **inputs,
        )
        answer.append(int(output.logits[0, -1].argmax()))
        inputs, cache = {}, output.past_key_values
        token_ids = torch.tensor([answer[-1:]])
        positions = torch.full((3, 1), num_tokens + i + delta)
    assert len(set(answer)) > 2, "or equal answers would prove little"
    return answer


def make_prompts(model: Model) -> list[EngineRequest]:
    return [
        make_prompt(model, "one", 5, Clip(4), 6),
        make_prompt(model, "odd", Clip(5, fps=3.0), 4),
        make_prompt(model, "two", 3, Clip(4, 56, 56), Clip(3, 84, 84), 2),
        make_prompt(model, "mixed", 2, (56, 84), 3, Clip(6, 56, 56, 0.7), 1, (84, 56), 2),
        make_prompt(model, "reversed", 2, Clip(2, 112, 56), (56, 56), 5),
    ]


def test_any_schedule_yields_the_tokens_of_the_reference(model: Model) -> None:
    prompts = make_prompts(model)
    expected = {p.request_id: expected_answer(model.twins, p) for p in prompts}
    cases = [Case(p, []) for p in prompts]
    text = replace(make_case("text", [], 23, MAX_TOKENS).request, items=[])
    cases.append(Case(text, []))
    expected["text"] = expected_answer(model.twins, text)
    for chunk, share, block in ((200, 0.0, 16), (7, 0.08, 4)):
        schedule = RandomSchedule(random.Random(chunk), 800 // block, block, chunk, share)
        assert run_schedule(model.twins, cases, schedule) == expected
        assert (schedule.num_preemptions > 0) == (share > 0)
    answers, _ = run_core(
        model.twins, cases, num_blocks=48, budget=40, steps_between=2, max_model_len=160
    )
    assert answers == expected


class CutAt(RandomSchedule):
    """Computes a prompt in two steps: up to `max_chunk`, and the rest."""

    def next_batch(self, sequences: list[Sequence]) -> Batch:
        [sequence] = sequences
        left = sequence.num_uncomputed_tokens
        num = left if sequence.num_computed_tokens else min(left, self.max_chunk)
        self.grow(sequence, sequence.num_computed_tokens + num)
        return Batch([ScheduledSequence(sequence, num, num == left)])


def test_a_prompt_may_be_cut_anywhere(model: Model) -> None:
    prompt = make_prompt(model, "cut", 2, Clip(3, 56, 56), 2, Clip(2, 56, 56), 2)
    prompt = replace(prompt, sampling=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    expected = expected_answer(model.twins, prompt)[:2]
    for cut in range(1, len(prompt.prompt_token_ids)):
        schedule = CutAt(random.Random(0), 64, 8, cut, 0.0)
        assert run_schedule(model.twins, [Case(prompt, [])], schedule) == {"cut": expected}


def test_an_answer_continues_where_it_was_resumed(model: Model) -> None:
    prompt = make_prompt(model, "resumed", 5, Clip(4), 6)
    expected = expected_answer(model.twins, prompt)
    resumed = replace(
        prompt,
        prompt_token_ids=prompt.prompt_token_ids + expected[:4],
        sampling=SamplingParams(temperature=0, max_tokens=MAX_TOKENS - 4, ignore_eos=True),
    )
    schedule = RandomSchedule(random.Random(0), 64, 8, 50, 0.0)
    assert run_schedule(model.twins, [Case(resumed, [])], schedule) == {"resumed": expected[4:]}


def test_a_long_video_is_encoded_in_parts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = model.twins.tower
    assert tower is not None
    batch = [make_prompt(model, "a", Clip(9)).items[0].fields]
    batch.append(make_prompt(model, "b", (84, 56)).items[0].fields)
    whole = tower.adapter.encode(tower.model, batch)
    per_frame = len(whole[0]) // 5
    lengths: list[int] = []

    class Adapter(type(tower.adapter)):  # type: ignore[misc]
        def encode(self, model: Any, batch: Any) -> Any:
            lengths.append(sum(self.count(fields) for fields in batch))
            return super().encode(model, batch)

    monkeypatch.setattr("shared.models.tower.MAX_SPLIT_LEN", 2 * per_frame)
    monkeypatch.setattr("shared.models.tower.CPU_RUN_LEN", 2 * per_frame)
    adapter = Adapter(model.twins.reference.config)
    split = Tower(adapter, tower.model).encode(batch)
    assert max(lengths) <= 2 * per_frame
    assert len(lengths) >= 3
    for ours, theirs in zip(split, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_items_that_do_not_fit_their_modality_are_refused(model: Model) -> None:
    family = model.twins.served.family
    prompt = make_prompt(model, "bad", 1, Clip(4), 1)
    [item] = prompt.items
    family.check(prompt)
    for changed in (
        {"modality": "image"},
        {"modality": "audio"},
        {"fields": {**item.fields, "video_grid_thw": torch.tensor([0, 4, 6])}},
        {"fields": {**item.fields, "video_grid_thw": torch.tensor([2, 4, 5])}},
        {"fields": {**item.fields, "video_patches": item.fields["video_patches"][1:]}},
        {"placeholder": replace_offset(item.placeholder, 1)},
    ):
        with pytest.raises(RequestError):
            family.check(replace(prompt, items=[replace(item, **changed)]))
    if "second_per_grid_ts" in item.fields:
        for seconds in (float("nan"), -1.0, 1e30):
            fields = {**item.fields, "second_per_grid_ts": torch.tensor(seconds)}
            with pytest.raises(InvalidRequest, match="second_per_grid_ts"):
                family.check(replace(prompt, items=[replace(item, fields=fields)]))


def replace_offset(placeholder: PlaceholderRange, shift: int) -> PlaceholderRange:
    return PlaceholderRange(placeholder.offset + shift, placeholder.length, placeholder.is_embed)
