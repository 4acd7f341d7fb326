"""Models with audio input on the engine equal transformers' `generate`, token for token."""

import copy
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shared.codec.envelope import TensorData
from shared.codec.tensors import to_torch
from shared.models.frames import VideoSettings, resize_frame
from shared.models.media import VideoProbe
from shared.models.mel_layout import MelLayout, count_chunked_tokens, count_tokens
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


def build_qwen3_omni() -> Any:
    text = {**TEXT, "head_dim": 16, "pad_token_id": 0}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    text |= {"rope_parameters": {**omni.ROPE, "mrope_section": [2, 3, 3]}}
    # transformers knows the number of embeddings of a chunk for this length alone.
    ears = {**EARS, "downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 100}
    config = transformers.Qwen3OmniMoeThinkerConfig(
        audio_config=ears,
        vision_config={**omni.EYES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config=text,
        audio_token_id=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        position_id_per_seconds=13,
        pad_token_id=0,
        experts_implementation="eager",
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config).double()


BUILDERS = {
    "qwen2_audio": build_qwen2_audio,
    "qwen2_5_omni": build_omni,
    "qwen3_omni": build_qwen3_omni,
}


class Marks(NamedTuple):
    """Tokens before, of and after each medium."""

    sound: tuple[int, int, int]
    image: tuple[int, int, int]
    video: tuple[int, int, int]


MARKS = Marks(
    (AUDIO_START, AUDIO, AUDIO_END),
    (VISION_START, IMAGE, VISION_END),
    (VISION_START, VIDEO, VISION_END),
)


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


def sound_item(sound: Samples, offset: int, chunk_len: int | None = None) -> Item:
    """The item of a sound, which a model may hear in chunks of some frames."""
    num_frames = -(-len(sound) // 160)
    fields = Layout().fields_of(sound)
    count = count_tokens(num_frames)
    if chunk_len is not None:
        count = count_chunked_tokens(num_frames, chunk_len)
    tensors = {name: to_torch(tensor) for name, tensor in fields.items()}
    mm_hash = content_hash(sound.tobytes())
    return Item("audio", mm_hash, PlaceholderRange(offset, count), tensors)


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


def make_case(
    name: str, media: list[Content], num_words: int, chunk_len: int | None = None
) -> HeardCase:
    """Words, then each medium followed by words. For `chunk_len` see `sound_item`."""
    rng = np.random.default_rng(sum(name.encode()))
    words = rng.integers(0, NUM_WORDS, (len(media) + 1, num_words)).tolist()
    return fill_in(name, words, media, chunk_len)


def fill_in(
    name: str,
    words: list[list[int]],
    media: list[Content],
    chunk_len: int | None = None,
    marks: Marks = MARKS,
) -> HeardCase:
    """A prompt of words with a medium after each list of words but the last."""
    token_ids, seed = [*words[0]], sum(name.encode())
    items, images, sounds = [], [], []
    for i, size in enumerate(media):
        if isinstance(size, int):
            sounds.append(draw_sound(seed + i, size))
            item = sound_item(sounds[-1], len(token_ids) + 1, chunk_len)
            start, pad, end = marks.sound
        elif isinstance(size, Clip):
            item = video_item(size, len(token_ids) + 1, i)
            start, pad, end = marks.video
        else:
            images.append(draw_image(seed + i, *size))
            item = item_of(images[-1], len(token_ids) + 1)
            start, pad, end = marks.image
        items.append(item)
        token_ids += [start, *[pad] * item.placeholder.length, end, *words[i + 1]]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    return HeardCase(EngineRequest(name, token_ids, items, params), images, sounds)


def reference_answer(model: Any, case: Case, **options: bool) -> list[int]:
    return greedy_answer(model, case.request, **inputs_of(case), **options)


def inputs_of(case: Case) -> dict[str, Any]:
    """The media of a case as transformers takes them."""
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
    return inputs


def make_twins(model: Any, seed: int = 5) -> Twins:
    model = model.eval().requires_grad_(False)
    widen(model, seed)
    family = adapt(copy.deepcopy(model))
    assert family.tower is not None
    return Twins(model, FlatModel(family), Tower(family.tower, family.model))


def media_of(name: str) -> dict[str, list[Content]]:
    """Sounds of one token, of odd numbers of frames, of a whole chunk and of more, in any order."""
    media: dict[str, list[Content]] = {
        "text": [],
        # transformers takes one token for a sound that is not expanded yet.
        "shortest": [1_100 if name == "qwen2_audio" else 321],
        "two": [20_011, 3_217],
        "whole": [32_000],
        "cut": [3_217, 2_100],
    }
    if name == "qwen3_omni":
        # A sound below a second has other embeddings in transformers when another one is longer.
        media |= {"two": [20_011, 17_000], "cut": [18_217, 16_100]}
    if name != "qwen2_audio":
        media |= {"moving": [Clip(5, 2.0)], "seen": [(90, 60)], "first": [(84, 56), 4_000]}
    if name == "qwen2_5_omni":
        media |= {"all": [3_200, Clip(4, 3.0), (60, 120), Clip(2, 1.0)]}
        media |= {"both": [9_000, (60, 120), 3_200]}
    elif name == "qwen3_omni":
        # Times of frames with fractions, also in the positions after the videos.
        media |= {"all": [17_200, Clip(6, 3.0), (60, 120), Clip(5, 1.3)], "slow": [Clip(6, 0.7)]}
        media |= {"both": [19_000, (60, 120), 16_200]}
    return media


@pytest.fixture(scope="module", params=["qwen2_audio", "qwen2_5_omni", "qwen3_omni"])
def hearing(request: pytest.FixtureRequest) -> tuple[Twins, list[HeardCase], dict[str, list[int]]]:
    """A model, prompts of sounds, images and text, and the answers of transformers."""
    is_third = request.param == "qwen3_omni"
    # With other seeds, answers to sounds repeat one token.
    twins = make_twins(BUILDERS[request.param](), 2 if is_third else 5)
    chunk_len = 100 if is_third else None
    cases = [make_case(name, each, 5, chunk_len) for name, each in media_of(request.param).items()]
    answers = {case.request.request_id: reference_answer(twins.reference, case) for case in cases}
    assert all(len(set(answer)) > 3 for answer in answers.values())
    return twins, cases, answers


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [(200, 0.0, 16), pytest.param(7, 0.0, 4, marks=pytest.mark.long), (11, 0.1, 5)],
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
    length = len(case.request.prompt_token_ids)
    places = [item.placeholder for item in case.request.items]
    edges = {edge for place in places for edge in (place.offset, place.offset + place.length)}
    for cut in range(1, length):
        if cut % 5 and edges.isdisjoint((cut - 1, cut, cut + 1)):
            continue
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
    # The number of embeddings is the same for a sound of the same length.
    sound = sound_item(draw_sound(99, 20_011), items[0].placeholder.offset)
    other = [replace(sound, placeholder=items[0].placeholder), items[1]]
    schedule = RandomSchedule(random.Random(0), 64, 16, 200, 0.0)
    changed = replace(case, request=replace(case.request, items=other))
    assert run_schedule(twins, [changed], schedule) != {"two": answers["two"]}
