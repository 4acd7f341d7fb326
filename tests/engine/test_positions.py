"""Positions of videos: a request beyond the model's last one is refused, and harms no other."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shared.codec.tensors import to_torch
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ContextTooLong, InvalidRequest
from shared.models.frames import resize_frame
from shared.models.media import DecodedVideo, Frame, FramePlan, VideoProbe
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.cluster.test_hearing import MODEL
from tests.request_path import run
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.loader import LoadedModel, load
from workers.engine.main import build_core
from workers.renderer.processing.processor import Processor

SEES = ModelConfig(str(MODEL), max_videos=2)
NUM_FRAMES = 8
PER_SECOND = 25
"""Positions of a second in this model, which has 4096 of them."""


ENGINE = EngineConfig(prefix_caching=False, embedding_cache_mib=0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(SEES, ENGINE)


@pytest.fixture(scope="module")
def core(loaded: LoadedModel) -> EngineCore:
    return build_core(loaded, ENGINE)


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(SEES)


def video() -> DecodedVideo:
    def read(plan: FramePlan) -> Iterator[Frame]:
        frame = np.full((56, 84, 3), 200, np.uint8)
        return (resize_frame(frame, plan) for _ in plan.indexes)

    return DecodedVideo(VideoProbe(NUM_FRAMES, 2.0, 84, 56, is_sequence=True), read, "")


def request(
    processor: Processor, name: str, *seconds: float, max_tokens: int | None = 8
) -> EngineRequest:
    """A question about videos, with the seconds of each pair of frames by video."""
    token_ids, items = [5, 6, 7], []
    for number, value in enumerate(seconds):
        processed = processor.process(video(), "field", "")
        fields = {key: to_torch(tensor) for key, tensor in processed.fields.items()}
        fields["second_per_grid_ts"] = torch.tensor(value)
        place = PlaceholderRange(len(token_ids), processed.num_tokens)
        items.append(Item("video", f"{name} {number}", place, fields))
        token_ids += [processor.placeholder_ids["video"]] * processed.num_tokens + [8, 9]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, token_ids, items, sampling)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([1e6], "position 7500"),
        ([60.0], "position 45"),
        # Each is within the limit, and their sum is not.
        ([40.0, 40.0], "position 60"),
        ([float("nan")], "second_per_grid_ts is nan"),
        ([float("inf")], "second_per_grid_ts is inf"),
        ([-1.0], "second_per_grid_ts is -1.0"),
        ([3e38], "second_per_grid_ts is 3"),
    ],
)
def test_a_prompt_beyond_the_last_position_is_refused_and_its_neighbour_is_answered(
    core: EngineCore, processor: Processor, seconds: list[float], message: str
) -> None:
    good = request(processor, "good", 1.0)
    alone, _ = run(core, [good])
    answers, errors = run(core, [request(processor, "bad", *seconds), good])
    assert answers == alone | {"bad": []}
    assert set(errors) == {"bad"}
    assert type(errors["bad"]) is InvalidRequest
    assert errors["bad"].field == "items"
    assert message in errors["bad"].message
    if message.startswith("position"):
        assert "positions end at 4095" in errors["bad"].message
        assert "second_per_grid_ts" in errors["bad"].message


def test_an_answer_ends_at_the_last_position(
    loaded: LoadedModel, core: EngineCore, processor: Processor
) -> None:
    seconds = 4000 / PER_SECOND / (NUM_FRAMES // 2 - 1)
    endless = request(processor, "r", seconds, max_tokens=None)
    located = loaded.model.family.locate(endless)
    assert located is not None
    num_free = 4095 - int(located.prompt.max())
    assert 0 < num_free < 4096 - len(endless.prompt_token_ids)
    answers, errors = run(core, [endless])
    assert (len(answers["r"]), errors) == (num_free, {})
    _, errors = run(core, [request(processor, "r", seconds, max_tokens=num_free + 1)])
    assert type(errors["r"]) is ContextTooLong
    assert errors["r"].field == "sampling_params.max_tokens"
    assert f"max_tokens {num_free + 1} is more than the {num_free} positions" in errors["r"].message
    answers, errors = run(core, [request(processor, "r", seconds, max_tokens=num_free)])
    assert (len(answers["r"]), errors) == (num_free, {})
