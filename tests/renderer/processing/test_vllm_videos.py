"""Videos for vLLM's servers: items, placeholders and hashes equal to those recorded from one."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2_5_VLConfig

from shared.codec import vllm_kwargs
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField, decode_item, encode_item
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import InvalidRequest
from shared.models.frames import resize_frame
from shared.models.media import VideoProbe
from shared.models.qwen_video import Qwen25VideoLayout
from shared.protocol.multimodal import VIDEO, FrameSampling
from shared.protocol.requests import SEQUENCE_HEAD
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.image_decoder import decode_data_url
from workers.renderer.processing.processor import ProcessedImage, Processor
from workers.settings import DEMO_MODEL

RECORDED = Path(__file__).parents[2] / "recorded"
VLLM = json.loads((RECORDED / "vllm_videos.json").read_text())
# The name with which vLLM's server was started.
MODEL_ID = "qwen2vl"


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(ModelConfig(str(DEMO_MODEL)))


@pytest.fixture(scope="module")
def decoders() -> Iterator[MediaDecoders]:
    in_thread: Any = None  # these tests decode in their own thread
    pool = MediaDecoders(RendererConfig(), in_thread)
    pool.start()
    yield pool
    pool.close()


def file_of(name: str) -> bytes:
    if name == "mp4":
        return (RECORDED / "clip.mp4").read_bytes()
    return decode_data_url(VLLM[name]["url"], RendererConfig(), "field", VIDEO)


def process(decoders: MediaDecoders, processor: Processor, name: str) -> ProcessedImage:
    with decoders.open(VIDEO, file_of(name), "field") as video:
        return processor.process(video, "field", "")


def digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", ["mp4", "jpegs"])
def test_items_and_hashes_equal_vllms_to_the_byte(
    decoders: MediaDecoders, processor: Processor, name: str
) -> None:
    item, recorded = process(decoders, processor, name), VLLM[name]
    data, metadata = processor.encode_item(item)
    assert digest(data) == (recorded["item_len"], recorded["item_sha256"])
    assert metadata == base64.b64decode(recorded["mm_metadata"])
    assert item.num_tokens == recorded["placeholder"]["length"]
    file = file_of(name).removeprefix(SEQUENCE_HEAD)
    assert vllm_kwargs.mm_hash(VIDEO, file, MODEL_ID, item.video) == recorded["mm_hash"]
    # The item that vLLM sends equals the item from the file.
    received = processor.decode_item(VIDEO, data, item.mm_hash, "field")
    assert received.num_tokens == item.num_tokens
    assert received.fields.keys() == item.fields.keys()
    for field, tensor in item.fields.items():
        assert received.fields[field] == tensor, field


def test_an_item_of_qwen_2_5_equals_vllms_to_the_byte(tmp_path: Path) -> None:
    settings = {"size": {"shortest_edge": 6272, "longest_edge": 10609}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    layout = Qwen25VideoLayout.open(tmp_path, Qwen2_5_VLConfig())
    assert layout is not None
    frames = np.random.default_rng(0).integers(0, 256, (6, 84, 112, 3), dtype=np.uint8)
    plan = layout.plan(VideoProbe(24, 8.0, 112, 84), FrameSampling(), "field")
    assert plan.indexes == (0, 4, 8, 12, 16, 20)
    fields, num_tokens = layout.pack((resize_frame(f, plan) for f in frames), plan, "field")
    data = encode_item(layout.to_wire(fields))
    recorded = VLLM["qwen2_5_vl"]
    assert digest(data) == (recorded["item_len"], recorded["item_sha256"])
    assert layout.from_wire(decode_item(data, "field"), "field") == (fields, num_tokens)


def test_items_that_do_not_fit_are_refused(decoders: MediaDecoders, processor: Processor) -> None:
    item = process(decoders, processor, "jpegs")
    data, _ = processor.encode_item(item)
    wire = decode_item(data, "field")
    grid = wire["video_grid_thw"]
    kind = grid.kind
    for changed in (
        {"video_grid_thw": WireField(grid.tensor, kind)},
        wire | {"second_per_grid_ts": grid},
        wire | {"video_grid_thw": numbers([0, 6, 8], kind)},
        wire | {"video_grid_thw": numbers([2, 6, 7], kind)},
        wire | {"video_grid_thw": numbers([3, 6, 8], kind)},
        wire | {"video_grid_thw": numbers([2**40, 2**20, 8], kind)},
    ):
        with pytest.raises(InvalidRequest) as caught:
            processor.decode_item(VIDEO, encode_item(changed), "hash", "field")
        assert caught.value.field == "field"


def numbers(values: list[int], kind: vllm_kwargs.Kind) -> WireField:
    array = np.array(values, np.int64)
    tensor = TensorData("int64", array.shape, memoryview(array.tobytes()))
    return WireField(tensor, kind)
