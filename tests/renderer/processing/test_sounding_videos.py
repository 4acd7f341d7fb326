"""Videos with sound in the renderer: one item has the frames and the sound."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from shared.codec.tensors import to_torch
from shared.codec.vllm_kwargs import decode_item, encode_item, mm_hash
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import ContextTooLong, InvalidRequest, MediaTooLarge, UnsupportedContent
from shared.models.media import AudioProbe, DecodedAudio, DecodedVideo
from shared.models.registry import find_tower
from shared.protocol.multimodal import AUDIO, VIDEO, FrameSampling, Modality
from shared.protocol.requests import Feature, Message, Prompt, TextPart, VideoPart, VideoURL
from tests import omni
from tests.renderer.decoding import files
from tests.renderer.processing.test_processor import TEMPLATE, VISION, write_model
from tests.renderer.processing.test_video_inputs import SETTINGS, noise, undecodable
from tests.renderer.threads import in_thread
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.processing.processor import ProcessedImage, Processor

FIELD = "messages[0].content[0].video_url.url"
HEARD = FrameSampling(use_audio=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    omni.write_qwen25(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor(ModelConfig(str(folder)))


@pytest.fixture(scope="module")
def decoders() -> Iterator[MediaDecoders]:
    # With one decoder, a video and its sound would wait for each other if each needed one.
    decoders = MediaDecoders(RendererConfig(decoders=1), in_thread)
    yield decoders
    decoders.close()


class Reader:
    def __init__(self, processor: Processor, decoders: MediaDecoders) -> None:
        self.processor = processor
        self.decoders = decoders

    def read(
        self, data: bytes, modality: Modality = VIDEO, sampling: FrameSampling = HEARD
    ) -> ProcessedImage:
        with self.decoders.open(modality, data, FIELD, "", sampling) as media:
            processed = self.processor.process(media, FIELD, "", sampling)
            measured = self.processor.measure(media, FIELD, sampling)
        assert (measured.num_tokens, measured.placement) == (
            processed.num_tokens,
            processed.placement,
        )
        return processed


@pytest.fixture(scope="module")
def reader(processor: Processor, decoders: MediaDecoders) -> Reader:
    return Reader(processor, decoders)


def test_an_item_has_the_fields_of_the_video_and_of_its_sound(reader: Reader) -> None:
    data = files.sounding()
    both, silent = reader.read(data), reader.read(data, sampling=FrameSampling())
    sound = reader.read(data, AUDIO, FrameSampling())
    assert silent.placement is None
    assert "input_features" not in silent.fields
    assert both.fields == {**silent.fields, **sound.fields}
    assert both.num_tokens == silent.num_tokens + sound.num_tokens
    assert both.modality == VIDEO
    assert len({both.mm_hash, silent.mm_hash, sound.mm_hash}) == 3
    assert both.placement is not None
    # Two seconds: one chunk of each between the marks.
    assert both.placement.token_ids == [
        omni.AUDIO_START,
        *[omni.VIDEO] * silent.num_tokens,
        *[omni.AUDIO] * sound.num_tokens,
        omni.AUDIO_END,
    ]


def test_the_sound_of_each_chunk_follows_its_frames(reader: Reader) -> None:
    both = reader.read(files.sounding(120, 24, 5.0))
    assert both.placement is not None
    ids = np.array(both.placement.token_ids[1:-1])
    runs = np.split(ids, np.flatnonzero(np.diff(ids)) + 1)
    assert [run[0] for run in runs] == [omni.VIDEO, omni.AUDIO] * 3
    assert [len(run) for run in runs[1::2]][:2] == [50, 50]


def test_a_video_without_a_sound_is_a_video(reader: Reader) -> None:
    silent, plain = reader.read(files.video()), reader.read(files.video(), sampling=FrameSampling())
    assert silent.fields == plain.fields
    assert silent.placement is None
    animated = files.animated("GIF")
    assert reader.read(animated).placement is None


def test_the_item_fits_the_model_that_it_was_rendered_for(folder: Path, reader: Reader) -> None:
    both = reader.read(files.sounding())
    adapter = find_tower(AutoConfig.from_pretrained(folder))
    assert adapter is not None
    fields = {name: to_torch(tensor) for name, tensor in both.fields.items()}
    adapter.check(fields)
    assert adapter.count(fields) == both.num_tokens
    metadata = reader.processor.metadata(VIDEO, both.fields)
    assert set(metadata) == {"video_grid_thw", "second_per_grid_ts", "audio_frames"}
    assert adapter.count({name: to_torch(tensor) for name, tensor in metadata.items()}) == (
        both.num_tokens
    )


def test_items_of_qwen3_omni_fit_the_model(tmp_path: Path, decoders: MediaDecoders) -> None:
    omni.write_qwen3(tmp_path)
    settings = SETTINGS | {"patch_size": omni.EYES["patch_size"]}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    reader = Reader(Processor(ModelConfig(str(tmp_path))), decoders)
    data = files.sounding()
    adapter = find_tower(AutoConfig.from_pretrained(tmp_path))
    assert adapter is not None
    sound = reader.read(data, AUDIO, FrameSampling())
    silent, both = reader.read(data, sampling=FrameSampling()), reader.read(data)
    assert both.fields == {**silent.fields, **sound.fields}
    for item in (sound, silent, both):
        fields = {name: to_torch(tensor) for name, tensor in item.fields.items()}
        adapter.check(fields)
        assert adapter.count(fields) == item.num_tokens
    # The sound goes on between the frames, which come first.
    assert both.placement is not None
    ids = np.array(both.placement.token_ids[1:-1])
    runs = np.split(ids, np.flatnonzero(np.diff(ids)) + 1)
    assert [run[0] for run in runs[:3]] == [omni.VIDEO, omni.AUDIO, omni.VIDEO]
    assert sum(len(run) for run in runs if run[0] == omni.AUDIO) == sound.num_tokens


def with_sound(video: DecodedVideo, seconds: float, fails: bool = True) -> DecodedVideo:
    def read(plan: Any) -> Iterator[np.ndarray[Any, Any]]:
        assert not fails, "the sound was decoded"
        yield np.zeros(int(seconds * plan.rate), np.float32)

    sound = DecodedAudio(AudioProbe(seconds, 16_000, 1), read, "file")
    return replace(video, sound=sound)


def test_a_sound_too_long_for_the_context_costs_no_decoding(processor: Processor) -> None:
    num_seen = processor.process(noise(), FIELD, "").num_tokens
    media = with_sound(undecodable(), 4.0)
    with pytest.raises(ContextTooLong, match=f"video's {num_seen + 100} tokens are more than"):
        processor.process(media, FIELD, "", HEARD, num_seen + 99)


def test_a_sound_longer_than_the_model_hears_is_refused(processor: Processor) -> None:
    with pytest.raises(MediaTooLarge, match=r"9999\.00 seconds is over this model") as caught:
        processor.process(with_sound(undecodable(), 9999.0), FIELD, "", HEARD, 10**6)
    assert caught.value.field == FIELD


def test_a_video_rendered_by_one_server_is_accepted_by_another(reader: Reader) -> None:
    processor = reader.processor
    both = reader.read(files.sounding())
    token_ids, (place,) = processor.expand([1, omni.VISION_START, omni.VIDEO, 2], [both])
    data, _ = processor.encode_item(both)
    feature = Feature(VIDEO, both.mm_hash, place.offset, place.length)
    assert processor.check_features(Prompt(token_ids=token_ids, features=[feature])) == [place]
    item = processor.decode_item(VIDEO, data, "hash", "field")
    assert (item.num_tokens, item.placement) == (both.num_tokens, both.placement)
    num_frames = item.fields["input_features"].shape[1]
    for name, tensor in both.fields.items():
        if name != "input_features":
            assert item.fields[name] == tensor, name
    ours = to_torch(both.fields["input_features"])[:, :num_frames]
    assert to_torch(item.fields["input_features"]).equal(ours)


def test_an_item_with_half_a_sound_is_refused(reader: Reader) -> None:
    data, _ = reader.processor.encode_item(reader.read(files.sounding()))
    wire = decode_item(data, "field")
    for name in ("audio_feature_lengths", "video_grid_thw"):
        rest = encode_item({key: value for key, value in wire.items() if key != name})
        with pytest.raises(InvalidRequest, match="has the fields"):
            reader.processor.decode_item(VIDEO, rest, "hash", "field")


def test_the_hash_for_other_servers_covers_the_sound_of_a_video(reader: Reader) -> None:
    data = files.sounding()
    facts = reader.read(data).video, reader.read(data, sampling=FrameSampling()).video
    assert len({mm_hash(VIDEO, data, "m", value) for value in facts}) == 2


def test_models_that_do_not_hear_videos_say_so(
    processor: Processor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_model(tmp_path_factory.mktemp("deaf"), VISION, TEMPLATE)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    messages = [Message("user", [TextPart("?"), VideoPart(VideoURL("data:,", use_audio=True))])]
    processor.check(messages)
    with pytest.raises(UnsupportedContent, match="does not use the sound of videos") as caught:
        Processor(ModelConfig(str(folder))).check(messages)
    assert caught.value.field == "messages[0].content[1].video_url.use_audio"
