"""Generic families with images, token for token in float64, from a model folder.

The reference is transformers' processor and `generate` on the whole prompt. Video processors need
torchvision, so the reference's processor has none either. `make tests-long` runs all types, and CI
runs one of each kind.
"""

import copy
import inspect
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, InvalidMedia, InvalidRequest, UnsupportedContent
from shared.models.family import Source
from shared.models.generic_image import GenericImageLayout, open_processor
from shared.models.generic_tower import GenericLanguage, GenericTower, SpanLanguage
from shared.models.generic_vision import TESTED_IMAGE_TYPES
from shared.models.media import DecodedImage
from shared.models.registry import adapt, find_family
from shared.models.tower_adapter import Fields
from shared.native import library
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from tests.engine.model.test_parity import (
    Case,
    RandomSchedule,
    Twins,
    draw_image,
    from_afar,
    run_core,
    run_schedule,
)
from tests.models.rig import answer_greedily, assert_joined_as_single, make_case
from tests.models.vision_specs import IDS, SPECS, draw_model, make_config, write_files, write_folder
from workers.engine.cpu.decoder import NativeModel
from workers.engine.loader import load
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.self_check import check_against_whole
from workers.engine.model.support import check_supported
from workers.renderer.processing.processor import Processor, join

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12

# Positions in three axes and experts, tiles, rows with marks between them, and lists of images.
ALWAYS = ["glm4v_moe", "internvl", "mistral3", "smolvlm"]
TYPES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in SPECS]


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


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tmp_path_factory.mktemp("glm"), "glm4v")


# -- tokens ---------------------------------------------------------------------------------------

QUESTIONS: dict[str, tuple[str, list[Image.Image]]] = {
    "none": ("Who?", []),
    "one": ("See?", [draw_image(1, 90, 60)]),
    "two": ("Both?", [draw_image(2, 70, 120), draw_image(3, 56, 64)]),
}


def messages(text: str, images: Sequence[Image.Image]) -> list[Message]:
    return [Message("user", [*(ImagePart(ImageURL("")) for _ in images), TextPart(text)])]


def make_cases(model: Model) -> list[Case]:
    cases = []
    for name, (text, images) in QUESTIONS.items():
        decoded = [DecodedImage(image, f"{name} {i}") for i, image in enumerate(images)]
        rendered = render(model.processor, messages(text, images), decoded)
        cases.append(make_case(name, rendered, images, max_tokens=MAX_TOKENS))
    return cases


def generate(model: Model, text: str, images: list[Image.Image]) -> tuple[list[int], list[int]]:
    return ask_transformers(model.folder, model.twins.reference, text, images)


def processor_inputs(
    folder: Path, reference: Any, text: str, images: list[Image.Image]
) -> dict[str, Tensor]:
    """Return the arguments of the model from its own processor."""
    config = AutoConfig.from_pretrained(folder)
    processor, _ = open_processor(folder, config.model_type)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if images:
        arrays = processor(
            text=[prompt], images=images, return_tensors="np", return_mm_token_type_ids=True
        )
    else:
        # GOT-OCR's processor needs an image.
        arrays = processor.tokenizer([prompt], return_tensors="np", return_token_type_ids=False)
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    inputs = {
        name: tensor.to(reference.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if "mm_token_type_ids" not in inspect.signature(reference.forward).parameters:
        inputs.pop("mm_token_type_ids", None)
    return inputs


def ask_transformers(
    folder: Path, reference: Any, text: str, images: list[Image.Image]
) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of transformers, from its own processor."""
    inputs = processor_inputs(folder, reference, text, images)
    return answer_greedily(reference, inputs, MAX_TOKENS)


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
    assert expected["one"] != expected["none"]


def test_images_of_one_size_are_encoded_together(model: Model) -> None:
    images = [draw_image(number, 90, 60) for number in range(3)]
    # An image of another shape is between them.
    images.insert(1, draw_image(3, 60, 150))
    items = [
        make_case(
            str(number),
            render(model.processor, messages("", [image]), [DecodedImage(image, str(number))]),
            [image],
            1,
        )
        .request.items[0]
        .fields
        for number, image in enumerate(images)
    ]
    shapes = {tuple((name, value.shape) for name, value in fields.items()) for fields in items}
    assert model.twins.tower is not None
    assert_joined_as_single(model.twins.tower, items, num_calls=len(shapes))


@pytest.mark.skipif(library.load() is None, reason="no compiler, or no AVX-512")
def test_a_decoder_of_a_native_type_runs_on_the_kernels(tmp_path: Path) -> None:
    """InternVL has a Qwen2 for its text."""
    reference = write_folder(tmp_path, "internvl").float()
    config = ModelConfig(str(tmp_path), dtype="float32")
    loaded = load(config, EngineConfig(num_blocks=512))
    assert isinstance(loaded.model, NativeModel)
    model = Model(tmp_path, Processor(config), Twins(reference, loaded.model, loaded.tower))
    schedule = RandomSchedule(random.Random(0), 128, 8, 7, 0.0)
    assert run_schedule(model.twins, make_cases(model), schedule) == {
        name: generate(model, *question)[1] for name, question in QUESTIONS.items()
    }


def test_each_tested_type_has_a_spec() -> None:
    # Its processor writes the prompt, so it has a file of tests: `test_paligemma.py`.
    assert {*SPECS, "paligemma"} == TESTED_IMAGE_TYPES
    for model_type in SPECS:
        family = find_family(AutoConfig.for_model(model_type))
        assert family is not None
        assert (family.source, list(family.media)) == ("generic", [IMAGE])


@pytest.fixture(scope="module", params=["gemma3", pytest.param("gemma4", marks=pytest.mark.long)])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tmp_path_factory.mktemp(request.param), request.param)


def test_spans_survive_preemptions(gemma: Model) -> None:
    cases = make_cases(gemma)
    expected = {name: generate(gemma, *question)[1] for name, question in QUESTIONS.items()}
    lengths = [len(case.request.prompt_token_ids) for case in cases]
    answers, runner = run_core(
        gemma.twins,
        cases,
        # The prompts fit, and not all answers.
        num_blocks=sum(-(-length // 4) for length in lengths) + 1,
        budget=40,
        steps_between=0,
        max_model_len=max(lengths) + MAX_TOKENS,
    )
    assert answers == expected
    assert max(runner.num_starts.values()) > 1


def test_a_cached_prefix_may_end_in_a_span(gemma: Model) -> None:
    _, images = QUESTIONS["one"]
    decoded = [DecodedImage(images[0], "same")]
    texts = {"first": "See?", "second": "Tell"}
    cases = [
        make_case(name, render(gemma.processor, messages(text, images), decoded), images, 12)
        for name, text in texts.items()
    ]
    ((start, stop),) = gemma.twins.served.family.spans_of(cases[0].request)
    prompts = [case.request.prompt_token_ids for case in cases]
    num_shared = [a == b for a, b in zip(*prompts, strict=False)].index(False)
    num_cached = num_shared // 16 * 16
    assert start < num_cached < stop
    answers, runner = run_core(
        gemma.twins,
        cases,
        num_blocks=64,
        budget=512,
        steps_between=20,
        max_model_len=1024,
        block_size=16,
    )
    assert answers == {name: generate(gemma, text, images)[1] for name, text in texts.items()}
    num_prompt_tokens = sum(map(len, prompts)) - num_cached
    assert runner.num_tokens == num_prompt_tokens + 2 * (MAX_TOKENS - 1)


def test_spans_change_the_answers(gemma: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma.twins.served.family, "spans_of", lambda prompt: [])
    answers, _ = run_core(
        gemma.twins,
        make_cases(gemma),
        num_blocks=64,
        budget=512,
        steps_between=0,
        max_model_len=256,
    )
    expected = {name: generate(gemma, *question)[1] for name, question in QUESTIONS.items()}
    assert answers["none"] == expected["none"]
    assert answers["one"] != expected["one"]


# -- processes without torch ----------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from shared.models.lazy_module import hide_torch
hide_torch()
from shared.config.schema import ModelConfig
from shared.models.generic_image import sample_image
from shared.models.media import DecodedImage
from workers.renderer.processing.processor import Processor
for folder in sys.argv[1:]:
    processor = Processor(ModelConfig(folder))
    print(processor.process(DecodedImage(sample_image(), "one"), "field", "").num_tokens)
assert sys.modules["torch"] is None
"""


@pytest.mark.parametrize(
    "model_types", [ALWAYS, pytest.param(list(SPECS), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_renderers_and_checks_need_no_torch(model_types: list[str], tmp_path: Path) -> None:
    folders = []
    for model_type in model_types:
        write_files(folder := tmp_path / model_type, model_type)
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *folders], capture_output=True, text=True, check=True
    )
    assert len([line for line in done.stdout.split() if int(line) > 0]) == len(folders)
    checked = subprocess.run(
        [sys.executable, "-m", "workers.engine.model.check_folders"]
        + [word for folder in folders for word in (folder, "", "1")],
        capture_output=True,
        check=True,
    )
    reports = msgspec.json.decode(checked.stdout)
    assert [(row["family"], row["source"], row["reason"]) for row in reports] == [
        (model_type, "generic", None) for model_type in model_types
    ]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blip-2", "transformers has no processor of this type that expands the tokens"),
        ("cohere2_vision", "image processor of this type needs torchvision"),
        ("ernie4_5_vl_moe", "its experts depend on the modality of a token"),
        ("granite4_vision", "added in later layers"),
        ("janus", "runs with no other attention function"),
        ("ovis2", "embeddings replace more tokens than the placeholders"),
        ("molmo2", "it has a mask of its own"),
        ("video_llama_3", "computes the logits of all tokens"),
    ],
)
def test_types_are_refused_with_the_reason(model_type: str, reason: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    assert find_family(config) is None
    config.get_text_config().use_bidirectional_attention = None
    with pytest.raises(ConfigError, match=f"is of type '{model_type}'.*{reason}"):
        check_supported(config, tmp_path)


def test_other_types_with_images_are_untested() -> None:
    family = find_family(AutoConfig.for_model("deepseek_ocr2"))
    assert family is not None
    untested: Source = "generic, untested"
    assert (family.source, list(family.media)) == (untested, [IMAGE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_tested_types_pass_the_check(model_type: str, dtype: torch.dtype) -> None:
    spec = SPECS[model_type]
    drawn: Any = draw_model(make_config(model_type, spec.sizes, **spec.config), spec.seed)
    check_against_whole(FlatModel(adapt(drawn.to(dtype))), 8)


def test_images_without_their_spans_are_refused() -> None:
    drawn = draw_model(make_config("gemma3", image_token_index=IDS["<image>"]))
    tower = GenericTower(drawn.config)
    check_against_whole(FlatModel(SpanLanguage(drawn, tower)), 8)
    with pytest.raises(ConfigError, match="'gemma3' differ from transformers'"):
        check_against_whole(FlatModel(GenericLanguage(drawn, tower)), 8)


class Unmoved(GenericLanguage):
    def locate(self, prompt: Any) -> None:
        return None


def test_other_positions_of_an_image_are_refused(glm: Model) -> None:
    reference = copy.deepcopy(glm.twins.reference)
    with pytest.raises(ConfigError, match="'glm4v' differ from transformers'"):
        check_against_whole(FlatModel(Unmoved(reference, adapt(reference).tower)), 8)


def test_tokenizers_that_merge_images_with_texts_are_refused(tmp_path: Path) -> None:
    config = write_files(tmp_path, "aya_vision", merged="a")
    GenericImageLayout(tmp_path, config)
    file = tmp_path / "processor_config.json"
    settings = msgspec.json.decode(file.read_bytes()) | {"start_of_img_token": "a"}
    file.write_bytes(msgspec.json.encode(settings))
    with pytest.raises(ConfigError, match="merges the text of an image"):
        GenericImageLayout(tmp_path, config)


def test_folders_without_an_image_processor_are_refused(tmp_path: Path) -> None:
    config = write_files(tmp_path, "glm4v")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="no image processor"):
        GenericImageLayout(tmp_path, config)


# -- items ----------------------------------------------------------------------------------------


def one_image(model: Model) -> Case:
    return make_cases(model)[1]


def with_field(name: str, value: Tensor | None) -> Any:
    def change(fields: Fields) -> Fields:
        changed = dict(fields) | ({} if value is None else {name: value})
        if value is None:
            del changed[name]
        return changed

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_field("replacement", None), "replacement is missing"),
        (with_field("replacement", torch.zeros(3)), "replacement is torch.float32"),
        (with_field("image_grid_thw", torch.tensor([[1, 0, 4]])), "image_grid_thw is"),
        (with_field("image_grid_thw", torch.tensor([[1, 2**40, 2**40]])), "image_grid_thw is"),
        (with_field("pixel_values", torch.full((24, 1176), torch.nan)), "not finite"),
    ],
)
def test_items_with_other_fields_are_refused(glm: Model, change: Any, reason: str) -> None:
    request = one_image(glm).request
    (item,) = request.items
    changed = replace(item, fields=change(item.fields))
    with pytest.raises(InvalidRequest, match=reason):
        glm.twins.served.family.check(replace(request, items=[changed]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_field("pixel_values", torch.zeros(24, 7)), "cannot encode the image"),
        (with_field("pixel_values", None), "cannot encode the image"),
        (with_field("image_grid_thw", torch.tensor([[1, 2, 2]])), "embeddings for|cannot encode"),
    ],
)
def test_the_tower_refuses_what_the_model_cannot_encode(
    glm: Model, change: Any, reason: str
) -> None:
    (item,) = one_image(glm).request.items
    tower = glm.twins.tower
    assert tower is not None
    with pytest.raises(InvalidRequest, match=reason):
        tower.encode([change(item.fields)])
    assert len(tower.encode([item.fields])) == 1


def test_images_without_text_between_them_have_no_positions(glm: Model) -> None:
    images = [draw_image(4, 56, 56), draw_image(5, 56, 84)]
    processed = [
        glm.processor.process(DecodedImage(image, f"{i}"), "field", "")
        for i, image in enumerate(images)
    ]
    marker = glm.processor.placeholder_ids[IMAGE]
    token_ids, ranges = glm.processor.expand([40, marker, marker, 41], processed)
    case = make_case("touching", join(token_ids, ranges, processed), images, max_tokens=4)
    with pytest.raises(InvalidRequest, match="no positions for images without text between"):
        glm.twins.served.family.count_free_positions(case.request)


def test_images_are_not_exchanged_with_other_servers(glm: Model) -> None:
    picture = glm.processor.process(DecodedImage(draw_image(1, 90, 60), "one"), "field", "")
    with pytest.raises(UnsupportedContent, match="not exchanged"):
        glm.processor.encode_item(picture)


def test_images_that_the_processor_refuses_are_invalid_media(glm: Model) -> None:
    with pytest.raises(InvalidMedia, match="200 times as long as wide"):
        glm.processor.process(DecodedImage(draw_image(1, 900, 3), "one"), "field", "")
