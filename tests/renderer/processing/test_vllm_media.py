"""Sounds, and videos of further families, for vLLM's servers: compared with what these rendered."""

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ops.interop import models
from ops.interop.renderings import values_of
from shared.codec.vllm_kwargs import VideoFacts, decode_item, encode_item, mm_hash
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import InvalidRequest
from shared.protocol.multimodal import AUDIO, VIDEO, Modality
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.processing.processor import ProcessedImage, Processor

RECORDED = Path(__file__).parents[2] / "recorded"
VLLM = json.loads((RECORDED / "vllm_media.json").read_text())
FILES = {AUDIO: RECORDED / "fifth.wav", VIDEO: RECORDED / "clip.mp4"}
WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen2audio": models.write_qwen2audio,
    "qwen25vl": models.write_qwen25vl,
    "qwen3vl": models.write_qwen3vl,
    "omni": models.write_omni,
}
# A spectrum is rounded otherwise on other processors.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def decoders() -> Iterator[MediaDecoders]:
    in_thread: Any = None  # these tests decode in their own thread
    pool = MediaDecoders(RendererConfig(), in_thread)
    pool.start()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Processor]:
    by_name = {}
    for name, write in WRITERS.items():
        folder = tmp_path_factory.mktemp(name)
        write(folder)
        by_name[name] = Processor(ModelConfig(str(folder)))
    return by_name


def process(decoders: MediaDecoders, processor: Processor, modality: Modality) -> ProcessedImage:
    with decoders.open(modality, FILES[modality].read_bytes(), "field") as media:
        return processor.process(media, "field", "")


def recorded_item(name: str) -> bytes:
    return zlib.decompress(base64.b64decode(VLLM["sounds"][name]["item_zlib"]))


@pytest.mark.parametrize("name", VLLM["sounds"])
def test_a_sound_has_the_fields_and_the_hash_that_vllm_gives_it(
    decoders: MediaDecoders, processors: dict[str, Processor], name: str
) -> None:
    recorded, processor = VLLM["sounds"][name], processors[name]
    sound = process(decoders, processor, AUDIO)
    data, metadata = processor.encode_item(sound)
    ours, theirs = (values_of(base64.b64encode(i).decode()) for i in (data, recorded_item(name)))
    assert ours.keys() == theirs.keys()
    for field, value in ours.items():
        other = theirs[field]
        assert (value.dtype, value.shape, value.kind) == (other.dtype, other.shape, other.kind)
        assert value.steps(other) <= TOLERANCE
    expected = recorded["mm_metadata"]
    assert metadata == (None if expected is None else base64.b64decode(expected))
    assert sound.num_tokens == recorded["placeholder"]["length"]
    samples, _ = soundfile.read(FILES[AUDIO], dtype=np.float32)
    assert mm_hash(AUDIO, samples, recorded["model_id"]) == recorded["mm_hash"]


@pytest.mark.parametrize("name", VLLM["sounds"])
def test_a_sound_that_vllm_rendered_goes_back_to_the_byte(
    processors: dict[str, Processor], name: str
) -> None:
    item = recorded_item(name)
    sound = processors[name].decode_item(AUDIO, item, "hash", "field")
    assert processors[name].encode_item(sound)[0] == item


@pytest.mark.parametrize("name", VLLM["videos"])
def test_a_video_has_the_values_and_the_hash_that_vllm_gives_it(
    decoders: MediaDecoders, processors: dict[str, Processor], name: str
) -> None:
    recorded, processor = VLLM["videos"][name], processors[name]
    video = process(decoders, processor, VIDEO)
    data, _ = processor.encode_item(video)
    values = values_of(base64.b64encode(data).decode())
    assert {field: value.summary() for field, value in values.items()} == recorded["fields"]
    assert video.num_tokens == recorded["num_tokens"]
    file = FILES[VIDEO].read_bytes()
    assert mm_hash(VIDEO, file, recorded["model_id"], video.video) == recorded["mm_hash"]
    item = processor.decode_item(VIDEO, data, "hash", "field")
    assert (item.fields, item.num_tokens) == (video.fields, video.num_tokens)


def test_the_hash_of_a_video_with_sound_equals_vllms() -> None:
    facts = VideoFacts(24, 8.0, (0, 4, 8, 12, 16, 20), is_sequence=False, use_audio=True)
    recorded = VLLM["heard"]
    value = mm_hash(VIDEO, FILES[VIDEO].read_bytes(), recorded["model_id"], facts)
    assert value == recorded["mm_hash"]


def test_a_video_with_sound_from_vllm_is_refused(
    decoders: MediaDecoders, processors: dict[str, Processor]
) -> None:
    """vLLM has the sound as another item, so the video's own lacks it."""
    processor = processors["omni"]
    data, _ = processor.encode_item(process(decoders, processor, VIDEO))
    wire = decode_item(data, "field")
    flag = wire["use_audio_in_video"]
    true = replace(flag.tensor, data=memoryview(b"\1"))
    sounding = encode_item(wire | {"use_audio_in_video": replace(flag, tensor=true)})
    with pytest.raises(InvalidRequest, match="use_audio_in_video is true"):
        processor.decode_item(VIDEO, sounding, "hash", "field")
