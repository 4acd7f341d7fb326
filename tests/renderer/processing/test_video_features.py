"""Videos of Qwen3-VL between servers: what one renders, another takes."""

import json

import msgspec
import numpy as np
import pytest

from shared.codec.vllm_kwargs import decode_item
from shared.config.schema import ModelConfig
from shared.errors import InvalidRequest
from shared.protocol.multimodal import VIDEO
from shared.protocol.requests import Feature, Prompt
from tests.renderer.processing.test_processor import SPECIALS, TEMPLATE, VISION, write_model
from tests.renderer.processing.test_video_inputs import FIELD, SETTINGS, noise, undecodable
from workers.renderer.processing.processor import Processor

PAD = 300
"""Placeholder of a video, which no text has."""


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = write_model(tmp_path_factory.mktemp("qwen3"), VISION, TEMPLATE)
    first = json.loads((folder / "config.json").read_text())["image_token_id"]
    first -= SPECIALS.index("<|image_pad|>")
    names = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": first + SPECIALS.index(text) for name, text in names.items()}
    config = {"model_type": "qwen3_vl", "video_token_id": PAD, "image_token_id": PAD + 1, **ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return Processor(ModelConfig(str(folder)))


def rendered(processor: Processor) -> tuple[Prompt, bytes]:
    """Return a prompt with a video as one server renders it for another, and the item."""
    video = processor.process(noise(), FIELD, "")
    assert video.placement is not None
    assert video.placement.marks is not None
    start, end = video.placement.marks
    token_ids, (place,) = processor.expand([1, start, PAD, end, 2], [video])
    assert place.is_embed is not None
    data, _ = processor.encode_item(video)
    # vLLM's wire has no mask.
    feature = Feature(VIDEO, video.mm_hash, place.offset, place.length)
    assert processor.check_features(Prompt(token_ids=token_ids, features=[feature])) == [place]
    return Prompt(token_ids=token_ids, features=[feature]), data


def test_a_rendered_video_is_taken_as_it_was_rendered(processor: Processor) -> None:
    prompt, data = rendered(processor)
    video = processor.process(noise(), FIELD, "")
    item = processor.decode_item(VIDEO, data, "hash", "field")
    assert (item.num_tokens, item.placement) == (video.num_tokens, video.placement)
    for name, tensor in video.fields.items():
        assert item.fields[name] == tensor, name
    assert processor.measure(undecodable(), FIELD).placement == video.placement
    (place,) = processor.check_features(prompt)
    assert place.num_embeds == item.num_tokens


def test_times_are_a_list_of_numbers_as_in_vllm(processor: Processor) -> None:
    """vLLM gives the field no tensor; each pair of frames is placed at the middle of its times."""
    _, data = rendered(processor)
    element = msgspec.msgpack.decode(data)["timestamps"]
    assert element == {"data": [0.25, 1.5], "field": ["batched", {"keep_on_cpu": True}]}
    field = decode_item(data, "field")["timestamps"]
    assert field.is_list
    assert np.frombuffer(field.tensor.data, "<f8").tolist() == [0.25, 1.5]
    for wrong in ([], ["x"], [[0.5]], [0.5] * 5000):
        changed = msgspec.msgpack.decode(data)
        changed["timestamps"]["data"] = wrong
        with pytest.raises(InvalidRequest):
            decode_item(msgspec.msgpack.encode(changed), "field")
