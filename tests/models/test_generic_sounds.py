"""Generic families with sounds, token for token in float64, from a model folder.

The reference is transformers' processor and `generate` on the whole prompt.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import (
    ConfigError,
    InvalidMedia,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
)
from shared.models.generic_hearing import TESTED_SOUND_TYPES
from shared.models.generic_sound import GenericSoundLayout
from shared.models.registry import find_family
from shared.protocol.multimodal import AUDIO, FrameSampling, content_hash
from shared.protocol.requests import AudioPart, AudioURL, Message, TextPart
from tests.engine.model.test_parity import Case, Twins, from_afar, run_core
from tests.models.rig import answer_greedily, assert_joined_as_single, make_case
from tests.models.sound_specs import NUM_BINS, SPECS, WINDOW_S, write_files, write_folder
from tests.sounds import Samples, decoded, draw_sound, transformers
from workers.cli.models.reports import check_folders
from workers.engine.loader import load
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.support import check_supported
from workers.renderer.processing.processor import Processor

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12


@dataclass(frozen=True)
class Model:
    folder: Path
    processor: Processor
    twins: Twins


def open_model(folder: Path, model_type: str) -> Model:
    reference = write_folder(folder, model_type)
    config = ModelConfig(str(folder), dtype="float64")
    loaded = load(config, EngineConfig(num_blocks=512, kernels="torch"))
    assert isinstance(loaded.model, FlatModel)
    return Model(folder, Processor(config), Twins(reference, loaded.model, loaded.tower))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "musicflamingo" else pytest.mark.long)
        for name in SPECS
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tmp_path_factory.mktemp(request.param), request.param)


# Processors of these types take one sound for each prompt.
QUESTIONS: dict[str, tuple[str, Samples | None]] = {
    "none": ("Who?", None),
    "one": ("Hear?", draw_sound(1, 20_011)),
    "whole": ("Long?", draw_sound(2, 16_000 * WINDOW_S)),
    "short": ("And?", draw_sound(3, 3_000)),
}


def messages(text: str, sound: Samples | None) -> list[Message]:
    sounds = [] if sound is None else [AudioPart(AudioURL(""))]
    return [Message("user", [*sounds, TextPart(text)])]


def make_cases(model: Model) -> list[Case]:
    cases = []
    for name, (text, sound) in QUESTIONS.items():
        media = [] if sound is None else [decoded(sound)]
        media = [replace(each, source_hash=content_hash(name)) for each in media]
        rendered = render(model.processor, messages(text, sound), media)
        cases.append(make_case(name, rendered, [], max_tokens=MAX_TOKENS))
    return cases


def generate(model: Model, text: str, sound: Samples | None) -> tuple[list[int], list[int]]:
    return ask_transformers(model.folder, model.twins.reference, text, sound)


def ask_transformers(
    folder: Path, reference: Any, text: str, sound: Samples | None
) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of transformers, from its own processor."""
    model_type = AutoConfig.from_pretrained(folder).model_type
    kind = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[model_type]
    processor = getattr(transformers, kind).from_pretrained(folder)
    content = [{"type": "audio"}] * (sound is not None) + [{"type": "text", "text": text}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if sound is None:
        inputs = processor.tokenizer([prompt], return_tensors="pt", return_token_type_ids=False)
    else:
        inputs = processor(text=[prompt], audio=[sound], return_tensors="pt")
    tensors = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
        if name not in ("num_audio_tokens",)
    }
    return answer_greedily(reference, tensors, MAX_TOKENS)


def test_any_schedule_yields_the_tokens_of_generate(model: Model) -> None:
    cases = make_cases(model)
    prompts, expected = {}, {}
    for name, question in QUESTIONS.items():
        prompts[name], expected[name] = generate(model, *question)
    assert {case.request.request_id: case.request.prompt_token_ids for case in cases} == prompts
    twins = model.twins
    assert twins.tower is not None
    remote = [from_afar(case, twins.tower) for case in cases]
    for tower, own, budget in ((twins.tower, cases, 7), (None, remote, 512)):
        answers, runner = run_core(
            Twins(twins.reference, twins.served, tower),
            own,
            num_blocks=512,
            budget=budget,
            steps_between=3,
            max_model_len=1024,
        )
        assert answers == expected
        assert max(runner.batch_sizes) > 1
    assert all(len(set(answer)) > 5 for answer in expected.values()), "or it would prove little"


def test_sounds_of_one_length_are_encoded_together(model: Model) -> None:
    # A sound of another length is between them.
    sounds = [draw_sound(number, length) for number, length in enumerate([20_011, 9_000, 20_011])]
    items = []
    for number, sound in enumerate(sounds):
        media = replace(decoded(sound), source_hash=content_hash(str(number)))
        rendered = render(model.processor, messages("", sound), [media])
        items.append(make_case(str(number), rendered, [], 1).request.items[0].fields)
    assert model.twins.tower is not None
    assert_joined_as_single(model.twins.tower, items, num_calls=2)


def test_an_image_family_hears_nothing() -> None:
    family = find_family(AutoConfig.for_model("dots3_note"))
    assert family is not None
    assert AUDIO not in family.media


def test_each_tested_type_has_a_spec() -> None:
    assert SPECS.keys() == TESTED_SOUND_TYPES


# -- sounds ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tmp_path_factory.mktemp("glm"), "glmasr")


def test_sounds_beyond_the_window_are_refused_or_cut(glm: Model) -> None:
    long = decoded(draw_sound(1, 16_000 * WINDOW_S + 1))
    with pytest.raises(MediaTooLarge, match="limit of 2 seconds"):
        glm.processor.process(long, "url", "")
    lying = decoded(draw_sound(1, 16_000 * WINDOW_S + 1), promised=5)
    with pytest.raises(MediaTooLarge, match="limit of 2 seconds"):
        glm.processor.process(lying, "url", "")
    cut = glm.processor.process(long, "url", "", FrameSampling(overflow="cut"))
    beginning = decoded(next(iter(long.read(None)))[: 16_000 * WINDOW_S])  # type: ignore[arg-type]
    assert cut.num_tokens > glm.processor.process(beginning, "url", "").num_tokens > 0


def test_sounds_without_a_token_are_refused(glm: Model) -> None:
    with pytest.raises(InvalidMedia, match="a sound of 100 samples at 16000 Hz is too short"):
        glm.processor.process(decoded(draw_sound(1, 100)), "url", "")


def test_a_sound_is_measured_without_its_features(glm: Model) -> None:
    sound = decoded(draw_sound(1, 20_000))
    measured, whole = glm.processor.measure(sound, "url"), glm.processor.process(sound, "url", "")
    assert (measured.num_tokens, measured.placement) == (whole.num_tokens, whole.placement)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("input_features", torch.zeros(1, 3, 200), "cannot encode the audio"),
        (
            "input_features_mask",
            torch.ones(1, 8, dtype=torch.int64),
            "embeddings for|cannot encode",
        ),
    ],
)
def test_the_tower_refuses_what_the_model_cannot_encode(
    glm: Model, name: str, value: torch.Tensor, reason: str
) -> None:
    (item,) = make_cases(glm)[1].request.items
    assert glm.twins.tower is not None
    with pytest.raises(InvalidRequest, match=reason):
        glm.twins.tower.encode([{**item.fields, name: value}])


def test_items_are_not_exchanged(glm: Model) -> None:
    layout = GenericSoundLayout(glm.folder, AutoConfig.from_pretrained(glm.folder))
    with pytest.raises(UnsupportedContent, match="not exchanged"):
        layout.to_wire({})
    with pytest.raises(UnsupportedContent, match="not accepted"):
        layout.from_wire({}, "field")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("fun_asr_nano", "needs torchaudio"),
        ("granite_speech", "needs torchaudio"),
        ("vibevoice_asr", "encoded with random numbers"),
        ("voxtral", "no processor of this type that expands the tokens of a sound"),
    ],
)
def test_types_are_refused_with_the_reason(model_type: str, reason: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    assert find_family(config) is None
    with pytest.raises(ConfigError, match=f"is of type '{model_type}'.*{reason}"):
        check_supported(config, tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sampling_rate": 24_000}, "needs sounds at 24000 Hz; 16000 Hz is served"),
        ({"dither": 0.1}, "adds noise"),
    ],
)
def test_extractors_with_other_settings_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    config = write_files(tmp_path, "glmasr")
    options = {"feature_size": NUM_BINS, "chunk_length": WINDOW_S} | settings
    transformers.WhisperFeatureExtractor(**options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        GenericSoundLayout(tmp_path, config)


def test_tokens_that_merge_with_texts_are_refused(tmp_path: Path) -> None:
    config = write_files(tmp_path, "glmasr")
    (tmp_path / "processor_config.json").write_text('{"audio_token": "a"}')
    with pytest.raises(ConfigError, match="do not begin and end with tokens"):
        GenericSoundLayout(tmp_path, config)


def test_pagemill_examines_folders_without_torch(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in SPECS]
    for folder in folders:
        folder.mkdir()
        write_files(folder, folder.name)
    (tmp_path / "glmasr" / "preprocessor_config.json").unlink()
    (tmp_path / "glmasr" / "processor_config.json").unlink()
    reports = {report.family: report for report in check_folders(folders)}
    assert {report.source for report in reports.values()} == {"generic"}
    reasons = {name: report.reason for name, report in reports.items() if report.reason}
    assert list(reasons) == ["glmasr"]
    assert "has no preprocessor_config.json" in str(reasons["glmasr"])
