"""Features of sounds equal transformers' features bit for bit; sounds that are refused."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.arrays import to_numpy
from shared.errors import ConfigError, InvalidMedia, InvalidRequest, MediaTooLarge
from shared.models.families.qwen2_audio import Qwen2AudioLayout
from shared.models.families.qwen_omni import OmniAudioLayout, Qwen3OmniAudioLayout
from shared.models.mel_layout import SAMPLE_RATE, MelLayout, count_tokens
from shared.protocol.multimodal import FrameSampling
from tests.sounds import Samples, decoded, draw_sound, extract, transformers

pytestmark = pytest.mark.usefixtures("one_thread")

processing: Any = importlib.import_module(
    "transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe"
)

NUM_BINS, WINDOW_S = 32, 4
ANY = FrameSampling()


def audio_config(num_frames: int = 100 * WINDOW_S) -> Any:
    tower = SimpleNamespace(num_mel_bins=NUM_BINS, max_source_positions=num_frames // 2)
    return SimpleNamespace(audio_config=tower)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_extractor(tmp_path_factory.mktemp("extractor"))


def write_extractor(folder: Path, **settings: Any) -> Path:
    params = {"feature_size": NUM_BINS, "chunk_length": WINDOW_S, **settings}
    transformers.WhisperFeatureExtractor(**params).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def layout(folder: Path) -> Qwen2AudioLayout:
    return Qwen2AudioLayout(folder, audio_config())


@pytest.fixture(scope="module")
def omni(folder: Path) -> OmniAudioLayout:
    return OmniAudioLayout(folder, audio_config())


@pytest.fixture(scope="module")
def extractor(folder: Path) -> Any:
    return transformers.WhisperFeatureExtractor.from_pretrained(folder)


def process(layout: MelLayout, samples: Samples, sampling: FrameSampling = ANY) -> Any:
    media = decoded(samples)
    plan = layout.plan(media.probe, sampling, "url")
    fields, num_tokens = layout.pack(media.read(plan), plan, "url")
    assert plan.num_tokens == num_tokens
    outlined = {"audio_frames": fields["audio_frames"]}, num_tokens
    assert layout.outline(media.read(plan), plan, "url") == outlined
    return fields


# The ends of the window, and a sound that is affected by its end everywhere.
LENGTHS = [321, 400, 1600, 16_000, 63_799, 63_800, 63_840, 63_841, 63_999, 64_000]


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_features_equal_the_features_of_transformers(
    layout: Qwen2AudioLayout, extractor: Any, num_samples: int
) -> None:
    check_features(layout, extractor, draw_sound(num_samples, num_samples))


@given(st.integers(321, WINDOW_S * SAMPLE_RATE), st.sampled_from([0.0, 1e-6, 1.0]))
def test_features_of_any_sound_equal_the_features_of_transformers(
    layout: Qwen2AudioLayout, extractor: Any, num_samples: int, loudness: float
) -> None:
    sound = draw_sound(num_samples, num_samples) * np.float32(loudness)
    check_features(layout, extractor, sound)


def check_features(layout: Qwen2AudioLayout, extractor: Any, samples: Samples) -> None:
    fields = process(layout, samples)
    expected, num_frames = extract(extractor, samples)
    features, told_frames = layout.restore(fields)
    assert told_frames == num_frames
    assert to_numpy(fields["input_features"]).shape[1] <= num_frames + 3
    assert np.array_equal(features, expected)


@pytest.mark.parametrize(("window_s", "seconds"), [(30, 2.5), (300, 0.7)])
def test_features_of_the_models_windows(tmp_path: Path, window_s: int, seconds: float) -> None:
    folder = write_extractor(tmp_path, feature_size=128, chunk_length=window_s)
    config = audio_config(100 * window_s)
    config.audio_config.num_mel_bins = 128
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    sound = draw_sound(1, int(SAMPLE_RATE * seconds))
    check_features(Qwen2AudioLayout(folder, config), extractor, sound)


def test_tokens_equal_the_tokens_of_the_processors() -> None:
    for num_frames in range(3, 3001):
        # The formula of both processors.
        assert count_tokens(num_frames) == ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


QWEN3 = SimpleNamespace(
    model_type="qwen3_omni_moe_thinker",
    audio_config=SimpleNamespace(num_mel_bins=NUM_BINS, n_window=50),
)


@pytest.mark.parametrize("num_samples", [161, 320, 1_601, 16_000, 20_011, 64_000])
def test_features_of_qwen3_omni_end_with_the_sound(
    folder: Path, extractor: Any, num_samples: int
) -> None:
    layout = Qwen3OmniAudioLayout(folder, QWEN3)
    samples = draw_sound(num_samples, num_samples)
    fields = process(layout, samples)
    # transformers' processor drops the rest of a frame.
    extended = np.pad(samples, (0, -num_samples % 160))
    output = extractor(
        extended,
        sampling_rate=SAMPLE_RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    assert np.array_equal(to_numpy(fields["input_features"]), output["input_features"][0])
    num_frames = int(to_numpy(fields["audio_frames"]))
    assert num_frames == output["attention_mask"].sum()
    decoded, num_tokens = layout.from_wire(layout.to_wire(fields), "item")
    assert decoded == fields
    assert num_tokens == processing._get_feat_extract_output_lengths(num_frames)


def test_tokens_equal_the_tokens_of_qwen3_omnis_processor(folder: Path) -> None:
    layout = Qwen3OmniAudioLayout(folder, QWEN3)
    for num_frames in range(2, 1001):
        expected = processing._get_feat_extract_output_lengths(num_frames)
        assert layout.count(num_frames) == expected
    with pytest.raises(InvalidMedia, match=r"160 samples .* at least 161"):
        process(layout, draw_sound(0, 160))


@pytest.mark.parametrize("num_samples", [0, 1, 320])
def test_a_sound_too_short_for_a_token_is_refused(layout: MelLayout, num_samples: int) -> None:
    with pytest.raises(InvalidMedia, match=f"{num_samples} samples .* at least 321") as caught:
        process(layout, draw_sound(0, num_samples))
    assert caught.value.field == "url"


def test_a_sound_longer_than_the_window_is_refused_or_cut(layout: MelLayout) -> None:
    sound = draw_sound(0, int(4.5 * SAMPLE_RATE))
    with pytest.raises(MediaTooLarge, match=r"4.50 seconds .* 4 seconds"):
        process(layout, sound)
    cut = process(layout, sound, FrameSampling(overflow="cut"))
    whole = process(layout, sound[: WINDOW_S * SAMPLE_RATE])
    assert bytes(cut["input_features"].data) == bytes(whole["input_features"].data)


def test_a_header_that_promises_less_is_no_way_around_the_window(layout: MelLayout) -> None:
    media = decoded(draw_sound(0, 5 * SAMPLE_RATE), promised=SAMPLE_RATE)
    plan = layout.plan(media.probe, ANY, "url")
    with pytest.raises(MediaTooLarge, match="limit of 4 seconds"):
        layout.pack(media.read(plan), plan, "url")


def test_items_of_other_servers_have_the_same_fields(
    layout: Qwen2AudioLayout, omni: OmniAudioLayout
) -> None:
    for each in (layout, omni):
        fields = process(each, draw_sound(3, 20_000))
        wire = each.to_wire(fields)
        decoded, num_tokens = each.from_wire(wire, "item")
        assert num_tokens == count_tokens(int(to_numpy(fields["audio_frames"])))
        num_frames = int(to_numpy(decoded["audio_frames"]))
        assert num_frames == 125
        ours, received = (to_numpy(item["input_features"]) for item in (fields, decoded))
        assert np.array_equal(ours[:, :num_frames], received[:, :num_frames])
        with pytest.raises(InvalidRequest, match="features"):
            each.from_wire(spoilt(wire), "item")


def spoilt(wire: Any) -> Any:
    """The same item with features of fewer frames."""
    return {
        name: element
        if "features" not in name
        else type(element)(
            type(element.tensor)(
                element.tensor.dtype,
                (element.tensor.shape[0] * element.tensor.shape[1], 1),
                element.tensor.data,
            ),
            element.kind,
        )
        for name, element in wire.items()
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dither": 0.1}, r"dither 0\.1"),
        ({"padding_value": 1.0}, r"padding_value 1\.0"),
        ({"feature_size": 40}, "feature_size 40"),
        ({"chunk_length": 5}, "500 frames, but the audio tower needs 400"),
    ],
)
def test_other_extractors_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = write_extractor(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        Qwen2AudioLayout(folder, audio_config())
