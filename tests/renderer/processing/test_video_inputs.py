"""Videos in the processor: the tokens are known before a frame is decoded, and so are the caches'
keys."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.config.schema import ModelConfig
from shared.errors import ContextTooLong, MediaTooLarge, UnsupportedContent
from shared.models.frames import resize_frame
from shared.models.media import DecodedVideo, Frame, FramePlan, VideoProbe
from shared.protocol.multimodal import VIDEO, FrameSampling
from shared.protocol.requests import Message, VideoPart, VideoURL
from tests.renderer.processing.test_processor import TEMPLATE, VISION, write_model
from workers.renderer.processing.processor import Processor

FIELD = "messages[0].content[0].video_url.url"
SETTINGS = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("video"), VISION, TEMPLATE)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor(ModelConfig(str(folder), max_frames=16))


def noise(num_frames: int = 8) -> DecodedVideo:
    def read(plan: FramePlan) -> Iterator[Frame]:
        rng = np.random.default_rng(0)
        for _ in plan.indexes:
            yield resize_frame(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8), plan)

    return DecodedVideo(VideoProbe(num_frames, 4.0, 60, 40), read, "file")


def undecodable() -> DecodedVideo:
    def fail(index: int) -> Frame:
        raise AssertionError(f"frame {index} was decoded")

    def read(plan: FramePlan) -> Iterator[Frame]:
        return map(fail, plan.indexes)

    return DecodedVideo(VideoProbe(8, 4.0, 60, 40), read, "file")


def test_a_video_too_long_for_the_context_costs_no_decoding(processor: Processor) -> None:
    with pytest.raises(ContextTooLong, match=r"video's 12 tokens are more than the 11"):
        processor.process(undecodable(), FIELD, "", FrameSampling(), 11)
    processed = processor.process(noise(), FIELD, "", FrameSampling(), 12)
    assert (processed.modality, processed.num_tokens) == (VIDEO, 12)
    assert processed.fields["video_patches"].shape == (48, 3, 2 * 14 * 14)


def test_the_tokens_of_a_video_are_known_without_decoding(processor: Processor) -> None:
    measured = processor.measure(undecodable(), FIELD)
    assert measured.num_tokens == processor.process(noise(), FIELD, "").num_tokens


def test_frames_over_the_limit_of_memory_are_not_decoded(folder: Path) -> None:
    processor = Processor(ModelConfig(str(folder), max_frames_mib=1))
    sampling = FrameSampling(num_frames=64)
    video = DecodedVideo(VideoProbe(64, 1.0, 90, 90), undecodable().read, "file")
    with pytest.raises(MediaTooLarge, match=r"64 frames of 84 x 84 have 1354752 bytes.* 1 MiB"):
        processor.process(video, FIELD, "", sampling)


def test_the_sampling_is_a_part_of_the_hash(processor: Processor) -> None:
    samplings = [FrameSampling(), FrameSampling(fps=1.0), FrameSampling(num_frames=4)]
    samplings += [FrameSampling(max_frames=4), FrameSampling(fps=1.0, max_frames=4)]
    hashes = {processor.hash_media(VIDEO, "file", "", sampling) for sampling in samplings}
    hashes.add(processor.hash_media(VIDEO, "file", "tenant", samplings[0]))
    assert len(hashes) == len(samplings) + 1
    # The model's own limit changes nothing.
    assert processor.hash_media(VIDEO, "file", "", FrameSampling(max_frames=16)) in hashes


def test_videos_over_the_limit_are_refused_before_they_are_read(folder: Path) -> None:
    parts = [VideoPart(VideoURL("data:,"))] * 3
    with pytest.raises(MediaTooLarge, match=r"3, over the limit of 2 \(max_videos\)") as caught:
        Processor(ModelConfig(str(folder))).check([Message("user", [*parts])])
    assert caught.value.field == "messages[0].content[2].video_url.url"


def test_a_model_whose_images_are_resized_in_another_way_takes_no_videos(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_model(tmp_path_factory.mktemp("images"), VISION, TEMPLATE)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "resample": 2} | SETTINGS
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = Processor(ModelConfig(str(folder)))
    assert not processor.accepts(VIDEO)
    with pytest.raises(UnsupportedContent, match="takes no videos"):
        processor.check([Message("user", [VideoPart(VideoURL("data:,"))])])
