"""Models with audio input on the engine equal transformers' `generate`, token for token."""

import copy
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shared.codec.envelope import TensorData
from shared.codec.tensors import to_torch
from shared.models.frames import VideoSettings, resize_frame
from shared.models.media import VideoProbe
from shared.models.mel_layout import MelLayout, count_tokens
from shared.models.qwen_video import Qwen25VideoLayout
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.models.tower_adapter import look_up
from shared.protocol.multimodal import FrameSampling, PlaceholderRange, content_hash
from shared.protocol.sampling import SamplingParams
from tests import omni
from tests.engine.model.test_parity import (
    PROCESSOR,
    TEXT,
    Case,
    RandomSchedule,
    Twins,
    draw_image,
    greedy_answer,
    item_of,
    run_schedule,
    widen,
)
from tests.sounds import Samples, draw_sound, extract, transformers
from workers.engine.core.sequence import Batch, EngineRequest, Item, ScheduledSequence, Sequence
from workers.engine.model.flat_model import FlatModel

pytestmark = pytest.mark.usefixtures("one_thread")

AUDIO, AUDIO_START, AUDIO_END, IMAGE, VISION_START, VISION_END, VIDEO = range(190, 197)
NUM_WORDS = 190
NUM_BINS = 16
EXTRACTOR = transformers.WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=2)
SIZES = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
EARS = {**omni.EARS, "num_mel_bins": NUM_BINS, "max_source_positions": 100}
EARS |= {"d_model": 32, "encoder_ffn_dim": 48}


def build_qwen2_audio() -> Any:
    config = transformers.Qwen2AudioConfig(
        audio_config={name: value for name, value in EARS.items() if name != "output_dim"},
        text_config={**TEXT, "model_type": "qwen2", "pad_token_id": 0},
        audio_token_index=AUDIO,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def build_omni() -> Any:
    text = {**TEXT, "rope_parameters": {**omni.ROPE, "mrope_section": [2, 3, 3]}}
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=EARS,
        vision_config={**omni.EYES, "fullatt_block_indexes": [1], "window_size": 56},
        text_config={**text, "pad_token_id": 0},
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        pad_token_id=0,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


@dataclass(frozen=True)
class HeardCase(Case):
    sounds: list[Samples]


class Layout(MelLayout):
    """The fields of both families, with the extractor of this module."""

    def __init__(self) -> None:
        self._extractor, self._hop_len, self._window_len = EXTRACTOR, 160, EXTRACTOR.n_samples

    def to_wire(self, fields: Any) -> Any:
        raise NotImplementedError

    def from_wire(self, wire: Any, field: str) -> Any:
        raise NotImplementedError

    def fields_of(self, sound: Samples) -> dict[str, TensorData]:
        num_frames = -(-len(sound) // 160)
        return self._fields_of(self._extract(sound, num_frames), num_frames)


def sound_item(sound: Samples, offset: int) -> Item:
    num_frames = -(-len(sound) // 160)
    fields = Layout().fields_of(sound)
    placeholder = PlaceholderRange(offset, count_tokens(num_frames))
    tensors = {name: to_torch(tensor) for name, tensor in fields.items()}
    return Item("audio", content_hash(sound.tobytes()), placeholder, tensors)


@dataclass(frozen=True)
class Clip:
    """A video of noise; all of its frames are used."""

    num_frames: int
    fps: float


RATES: Any = SimpleNamespace(
    vision_config=SimpleNamespace(tokens_per_second=25),
    get_text_config=lambda: SimpleNamespace(max_position_embeddings=32_768),
)

Content = int | tuple[int, int] | Clip
"""A number of samples of a sound, the size of an image, or a video."""


def video_item(clip: Clip, offset: int, seed: int) -> Item:
    shape = (clip.num_frames, 56, 84, 3)
    frames = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    layout = Qwen25VideoLayout(VideoSettings(size=SIZES), RATES)
    probe = VideoProbe(clip.num_frames, clip.fps, 84, 56, is_sequence=True)
    plan = layout.plan(probe, FrameSampling(max_frames=64), "field")
    fields, num = layout.pack((resize_frame(frame, plan) for frame in frames), plan, "field")
    tensors = {name: to_torch(tensor) for name, tensor in fields.items()}
    return Item("video", f"{clip} {seed}", PlaceholderRange(offset, num), tensors)


def make_case(name: str, media: list[Content], num_words: int) -> HeardCase:
    """Words, then each medium followed by words."""
    rng = np.random.default_rng(sum(name.encode()))
    token_ids: list[int] = rng.integers(0, NUM_WORDS, num_words).tolist()
    items, images, sounds = [], [], []
    for i, size in enumerate(media):
        if isinstance(size, int):
            sounds.append(draw_sound(int(rng.integers(1000)) + i, size))
            item = sound_item(sounds[-1], len(token_ids) + 1)
            start, pad, end = AUDIO_START, AUDIO, AUDIO_END
        elif isinstance(size, Clip):
            item = video_item(size, len(token_ids) + 1, i)
            start, pad, end = VISION_START, VIDEO, VISION_END
        else:
            images.append(draw_image(int(rng.integers(1000)) + i, *size))
            item = item_of(images[-1], len(token_ids) + 1)
            start, pad, end = VISION_START, IMAGE, VISION_END
        items.append(item)
        token_ids += [start, *[pad] * item.placeholder.length, end]
        token_ids += rng.integers(0, NUM_WORDS, num_words).tolist()
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    return HeardCase(EngineRequest(name, token_ids, items, params), images, sounds)


def reference_answer(model: Any, case: Case, **options: bool) -> list[int]:
    inputs: dict[str, Any] = (
        dict(PROCESSOR(case.images, return_tensors="pt")) if case.images else {}
    )
    videos = [item.fields for item in case.request.items if item.modality == "video"]
    if videos:
        pixels = [look_up(v["video_patches"], v["pixel_table"]).flatten(1) for v in videos]
        inputs["pixel_values_videos"] = torch.cat(pixels)
        inputs["video_grid_thw"] = torch.stack([v["video_grid_thw"] for v in videos])
        seconds = torch.stack([v["second_per_grid_ts"] for v in videos])
        inputs["video_second_per_grid"] = seconds
    if isinstance(case, HeardCase) and case.sounds:
        inputs_of_sounds = [extract(EXTRACTOR, sound) for sound in case.sounds]
        inputs["input_features"] = torch.from_numpy(
            np.stack([features for features, _ in inputs_of_sounds])
        )
        frames = torch.tensor([num_frames for _, num_frames in inputs_of_sounds])
        mask = torch.arange(EXTRACTOR.nb_max_frames) < frames[:, None]
        inputs["feature_attention_mask"] = mask.long()
    return greedy_answer(model, case.request, **inputs, **options)


def make_twins(model: Any) -> Twins:
    model = model.eval().requires_grad_(False)
    widen(model)
    family = adapt(copy.deepcopy(model))
    assert family.tower is not None
    return Twins(model, FlatModel(family), Tower(family.tower, family.model))


@pytest.fixture(scope="module", params=["qwen2_audio", "qwen2_5_omni"])
def hearing(request: pytest.FixtureRequest) -> tuple[Twins, list[HeardCase], dict[str, list[int]]]:
    """A model, prompts of sounds, images and text, and what transformers answers."""
    # Sounds of one token, of odd numbers of frames, of a whole chunk and of more, in both orders.
    media: dict[str, list[Content]] = {
        "text": [],
        # transformers takes one token for a sound that is not expanded yet.
        "shortest": [1_100 if request.param == "qwen2_audio" else 321],
        "two": [20_011, 3_217],
        "whole": [32_000],
        "cut": [3_217, 2_100],
    }
    if request.param == "qwen2_5_omni":
        media |= {"moving": [Clip(5, 2.0)], "all": [3_200, Clip(4, 3.0), (60, 120), Clip(2, 1.0)]}
        media |= {"seen": [(90, 60)], "both": [9_000, (60, 120), 3_200], "first": [(84, 56), 4_000]}
    twins = make_twins(build_omni() if "omni" in request.param else build_qwen2_audio())
    cases = [make_case(name, each, 5) for name, each in media.items()]
    answers = {case.request.request_id: reference_answer(twins.reference, case) for case in cases}
    assert all(len(set(answer)) > 3 for answer in answers.values())
    return twins, cases, answers


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"), [(200, 0.0, 16), (7, 0.0, 4), (11, 0.1, 5)]
)
def test_models_that_hear_write_what_transformers_writes(
    hearing: Any, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    twins, cases, answers = hearing
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 800 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers


def test_a_prompt_may_be_cut_anywhere_in_a_sound(hearing: Any) -> None:
    twins, cases, answers = hearing
    case = next(case for case in cases if case.request.request_id == "cut")
    for cut in range(1, len(case.request.prompt_token_ids)):
        schedule = CutOnce(random.Random(0), 64, 16, cut, 0.0)
        assert run_schedule(twins, [case], schedule) == {"cut": answers["cut"]}, cut


class CutOnce(RandomSchedule):
    """The first step takes `max_chunk` tokens, and each later one all that there are."""

    def next_batch(self, sequences: list[Sequence]) -> Batch:
        (sequence,) = sequences
        left = sequence.num_uncomputed_tokens
        num_new_tokens = left if sequence.num_computed_tokens else min(left, self.max_chunk)
        self.grow(sequence, sequence.num_computed_tokens + num_new_tokens)
        return Batch([ScheduledSequence(sequence, num_new_tokens, num_new_tokens == left)])


def test_another_sound_changes_the_answer(hearing: Any) -> None:
    twins, cases, answers = hearing
    case = next(case for case in cases if case.request.request_id == "two")
    items = case.request.items
    other = [sound_item(draw_sound(99, 20_011), items[0].placeholder.offset), items[1]]
    schedule = RandomSchedule(random.Random(0), 64, 16, 200, 0.0)
    changed = replace(case, request=replace(case.request, items=other))
    assert run_schedule(twins, [changed], schedule) != {"two": answers["two"]}
