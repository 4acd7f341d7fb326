"""Videos with sound: tokens, positions and answers equal the results of transformers."""

import importlib
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shared.codec.arrays import from_numpy
from shared.errors import InvalidRequest
from shared.models.families.qwen_omni import OmniVideoLayout, Qwen3OmniVideoLayout
from shared.models.frames import VideoSettings
from shared.models.mrope import locate_grids
from shared.models.sound_in_video import SoundingVideo
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_audio_parity import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    MARKS,
    NUM_WORDS,
    VISION_END,
    VISION_START,
    Clip,
    CutOnce,
    HeardCase,
    Marks,
    build_omni,
    build_qwen3_omni,
    make_twins,
    reference_answer,
    sound_item,
    video_item,
)
from tests.engine.model.test_parity import (
    Case,
    RandomSchedule,
    Twins,
    draw_image,
    item_of,
    run_schedule,
)
from tests.sounds import draw_sound
from workers.engine.core.sequence import EngineRequest, Item

pytestmark = pytest.mark.usefixtures("one_thread")

processing: Any = importlib.import_module(
    "transformers.models.qwen2_5_omni.processing_qwen2_5_omni"
)
processing3: Any = importlib.import_module(
    "transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe"
)


@dataclass(frozen=True)
class Sounding:
    clip: Clip
    num_samples: int


Content = Sounding | int | tuple[int, int]
"""A video with its sound, a number of samples of a sound, or the size of an image."""


def transformers_tokens(
    grid: list[int],
    seconds: float,
    num_heard: int,
    chunk_len: int | None,
    marks: Marks = MARKS,
) -> list[int]:
    """Return the tokens that transformers' processor puts in the place of a video."""
    kind = processing.Qwen2_5OmniProcessor
    if chunk_len is not None:
        kind = processing3.Qwen3OmniMoeProcessor
    start, heard, end = marks.sound
    stub = SimpleNamespace(
        audio_bos_token=f"{start} ",
        audio_eos_token=f"{end} ",
        audio_token=f"{heard} ",
        video_token=f"{marks.video[1]} ",
        video_processor=SimpleNamespace(merge_size=2),
    )
    stub.get_chunked_index = lambda *args: kind.get_chunked_index(stub, *args)
    text = kind.replace_video_with_audio_token(
        stub,
        {"video_grid_thw": [grid], "video_second_per_grid": [seconds]},
        0,
        {"num_audio_tokens": [num_heard]},
        0,
        position_id_per_seconds=25 if chunk_len is None else 13,
        seconds_per_chunk=2.0,
    )
    return [int(number) for number in text.split()]


def sounding_item(
    content: Sounding, offset: int, seed: int, chunk_len: int | None, marks: Marks = MARKS
) -> tuple[Item, list[int]]:
    video = video_item(content.clip, offset, seed)
    sound = sound_item(draw_sound(seed, content.num_samples), offset, chunk_len)
    grid, seconds = video.fields["video_grid_thw"], float(video.fields["second_per_grid_ts"])
    ids = transformers_tokens(grid.tolist(), seconds, sound.placeholder.length, chunk_len, marks)
    mask = bytearray(-(-len(ids) // 8))
    for i in range(1, len(ids) - 1):
        mask[i // 8] |= 1 << i % 8
    placeholder = PlaceholderRange(offset, len(ids), bytes(mask))
    fields = {**video.fields, **sound.fields}
    return Item("video", video.mm_hash + sound.mm_hash, placeholder, fields), ids


def make_case(name: str, chunk_len: int | None, num_words: int = 5) -> Case:
    """The case of this name. For `chunk_len` see `sound_item`."""
    contents = CASES[name]
    rng = np.random.default_rng(sum(name.encode()))
    token_ids: list[int] = rng.integers(0, NUM_WORDS, num_words).tolist()
    items, images, sounds = [], [], []
    for seed, content in enumerate(contents):
        offset = len(token_ids) + 1
        if isinstance(content, Sounding):
            item, ids = sounding_item(content, offset, seed, chunk_len)
            sounds.append(draw_sound(seed, content.num_samples))
            token_ids += [VISION_START, *ids, VISION_END]
        elif isinstance(content, int):
            item = sound_item(draw_sound(seed, content), offset, chunk_len)
            sounds.append(draw_sound(seed, content))
            token_ids += [AUDIO_START, *[AUDIO] * item.placeholder.length, AUDIO_END]
        else:
            images.append(draw_image(seed, *content))
            item = item_of(images[-1], offset)
            token_ids += [VISION_START, *[IMAGE] * item.placeholder.length, VISION_END]
        items.append(item)
        token_ids += rng.integers(0, NUM_WORDS, num_words).tolist()
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    return HeardCase(EngineRequest(name, token_ids, items, params), images, sounds)


CASES: dict[str, list[Content]] = {
    # Two chunks of both; one alone is longer in the others.
    "equal": [Sounding(Clip(8, 2.0), 32_000)],
    "short": [Sounding(Clip(8, 2.0), 3_217)],
    "mute": [Sounding(Clip(12, 4.0), 1_100)],
    # Frames so far apart that chunks are without any.
    "sparse": [Sounding(Clip(6, 0.4), 20_011)],
    # In transformers, too, the sound of a video may be longer than its frames.
    "long": [Sounding(Clip(2, 2.0), 32_000)],
    "two": [Sounding(Clip(4, 3.0), 19_000), Sounding(Clip(5, 1.0), 22_345)],
    "mixed": [17_217, Sounding(Clip(4, 2.0), 20_011), (60, 120), Sounding(Clip(2, 1.0), 16_200)],
}


@pytest.fixture(scope="module", params=[None, 100], ids=["qwen2_5_omni", "qwen3_omni"])
def chunk_len(request: pytest.FixtureRequest) -> int | None:
    """Number of frames of a sound that Qwen3-Omni hears at once; None for Qwen2.5-Omni."""
    length: int | None = request.param
    return length


@pytest.fixture(scope="module")
def model(chunk_len: int | None) -> Twins:
    return make_twins(build_omni()) if chunk_len is None else make_twins(build_qwen3_omni(), 2)


@pytest.fixture(scope="module")
def cases(chunk_len: int | None) -> list[Case]:
    return [make_case(name, chunk_len) for name in CASES]


@pytest.fixture(scope="module")
def answers(model: Twins, cases: list[Case]) -> dict[str, list[int]]:
    answers = {
        case.request.request_id: reference_answer(model.reference, case, use_audio_in_video=True)
        for case in cases
    }
    assert all(len(set(answer)) > 3 for answer in answers.values())
    return answers


def test_positions_equal_the_positions_of_transformers(model: Twins, cases: list[Case]) -> None:
    for case in cases:
        items = case.request.items
        videos = [item.fields for item in items if "video_grid_thw" in item.fields]
        images = [f.fields["image_grid_thw"] for f in items if "image_grid_thw" in f.fields]
        audio_frames = [
            item.fields["audio_frames"] for item in items if "audio_frames" in item.fields
        ]
        ids = torch.tensor([case.request.prompt_token_ids])
        expected, deltas = model.reference.get_rope_index(  # type: ignore[operator]
            ids,
            torch.stack(images) if images else None,
            torch.stack([fields["video_grid_thw"] for fields in videos]),
            torch.ones_like(ids),
            True,
            torch.stack(audio_frames),
            torch.stack([fields["second_per_grid_ts"] for fields in videos]),
        )
        located = model.served.family.locate(case.request)
        assert located is not None
        # transformers adds fractions with 32 bits.
        torch.testing.assert_close(located.prompt.float(), expected[:, 0].float())
        assert located.delta == pytest.approx(deltas.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"), [(400, 0.0, 16), (7, 0.0, 4), (11, 0.1, 5)]
)
def test_videos_with_sound_are_answered_as_by_transformers(
    model: Twins,
    cases: list[Case],
    answers: dict[str, list[int]],
    max_chunk: int,
    preempt_share: float,
    block_size: int,
) -> None:
    schedule = RandomSchedule(
        random.Random(max_chunk), 1600 // block_size, block_size, max_chunk, preempt_share
    )
    assert run_schedule(model, cases, schedule) == answers


def test_a_prompt_may_be_cut_anywhere_in_a_video_with_sound(
    model: Twins, answers: dict[str, list[int]], chunk_len: int | None
) -> None:
    case = make_case("short", chunk_len)
    for cut in range(1, len(case.request.prompt_token_ids), 3):
        schedule = CutOnce(random.Random(0), 96, 16, cut, 0.0)
        assert run_schedule(model, [case], schedule) == {"short": answers["short"]}, cut


def test_another_sound_of_the_same_video_changes_the_answer(
    model: Twins, answers: dict[str, list[int]], chunk_len: int | None
) -> None:
    case = make_case("equal", chunk_len)
    (item,) = case.request.items
    other = sound_item(draw_sound(99, 32_000), 0).fields
    changed = replace(item, mm_hash="other", fields={**item.fields, **other})
    request = replace(case.request, items=[changed])
    schedule = RandomSchedule(random.Random(0), 96, 16, 400, 0.0)
    others = run_schedule(model, [replace(case, request=request)], schedule)
    assert others["equal"] != answers["equal"]


def test_the_layout_places_tokens_as_transformers_does(model: Twins, chunk_len: int | None) -> None:
    config = model.reference.config
    kind = OmniVideoLayout if chunk_len is None else Qwen3OmniVideoLayout
    layout = kind(VideoSettings(), config)
    rng = np.random.default_rng(0)
    for _ in range(200):
        grid = [int(rng.integers(1, 9)), *(2 * rng.integers(1, 4, 2)).tolist()]
        seconds, frames = float(rng.choice([0.5, 1, 2 / 3, 2, 5])), int(rng.integers(3, 900))
        metadata = {
            "video_grid_thw": from_numpy(np.array(grid, np.int64)),
            "second_per_grid_ts": from_numpy(np.array(seconds, np.float32)),
            "audio_frames": from_numpy(np.array(frames, np.int64)),
        }
        placement = layout.place(metadata, lambda text: [])
        assert placement is not None
        module = processing if chunk_len is None else processing3
        num_heard = int(module._get_feat_extract_output_lengths(frames))
        assert placement.token_ids == transformers_tokens(grid, seconds, num_heard, chunk_len)


def test_a_plain_video_has_no_placement(model: Twins) -> None:
    layout = OmniVideoLayout(VideoSettings(), model.reference.config)
    assert layout.place({"video_grid_thw": from_numpy(np.ones(3, np.int64))}, lambda t: []) is None


def broken(item: Item, how: str) -> Item:
    place = item.placeholder
    mask = place.is_embed or b""
    match how:
        case "mark":
            whole = PlaceholderRange(place.offset + 1, place.length - 1, _mask(place.length - 2))
            return replace(item, placeholder=whole)
        case "order":
            frames = item.fields["audio_frames"] + 4
            return replace(item, fields={**item.fields, "audio_frames": frames})
        case "seconds":
            seconds = torch.tensor(float("nan"))
            return replace(item, fields={**item.fields, "second_per_grid_ts": seconds})
        case "missing":
            fields = {k: v for k, v in item.fields.items() if k != "second_per_grid_ts"}
            return replace(item, fields=fields)
        case _:
            return replace(item, placeholder=replace_mask(place, mask))


def _mask(num: int) -> bytes:
    return ((1 << num) - 1).to_bytes(-(-(num + 1) // 8), "little")


def replace_mask(place: PlaceholderRange, mask: bytes) -> PlaceholderRange:
    return PlaceholderRange(place.offset, place.length, bytes([mask[0] | 1]) + mask[1:])


@pytest.mark.parametrize("how", ["mark", "order", "seconds", "missing", "mask"])
def test_an_item_whose_place_does_not_fit_is_refused(
    model: Twins, how: str, chunk_len: int | None
) -> None:
    request = make_case("equal", chunk_len).request
    model.served.family.check(request)
    with pytest.raises(InvalidRequest):
        model.served.family.check(replace(request, items=[broken(request.items[0], how)]))


def test_marks_at_the_edges_of_a_prompt_have_positions() -> None:
    video = SoundingVideo(1, 1, 1, 25.0, 3, 50)
    located = locate_grids(video.length, [video])
    # Without a token before it, the first mark is at the beginning.
    assert located.prompt[0].tolist() == [0, 0, 0, 1, 2, 3]
    assert located.delta == 4 - video.length
