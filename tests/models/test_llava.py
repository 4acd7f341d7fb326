"""LLaVA from messages and images to tokens, against transformers' own processor and generate."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlavaProcessor

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, InvalidRequest, UnsupportedContent
from shared.models.families.llava import LlavaTower
from shared.models.media import DecodedImage
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.requests import ContentPart, ImagePart, ImageURL, Message, TextPart
from tests import llava
from tests.engine.model.test_parity import Case, RandomSchedule, Twins, run_core, run_schedule
from tests.masks import pack_mask
from tests.models.rig import make_case
from workers.engine.loader import load
from workers.engine.model.flat_model import FlatModel
from workers.engine.runner import ModelRunner
from workers.renderer.processing.processor import Processor

pytestmark = pytest.mark.usefixtures("one_thread")

TOUCHING = llava.CHAT_TEMPLATE.replace("<image>\n", "<image>")


class Road:
    """A folder, as transformers takes it and as renderer and engine do."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model: Any = llava.write_model(folder, **settings)
        self.model.generation_config.eos_token_id = None  # for answers of the requested length
        self.own: Any = LlavaProcessor.from_pretrained(folder, local_files_only=True)
        self.processor = Processor(ModelConfig(str(folder)))
        loaded = load(ModelConfig(str(folder)), EngineConfig(num_blocks=128, kernels="torch"))
        assert isinstance(loaded.model, FlatModel)
        self.twins = Twins(self.model, loaded.model, loaded.tower)

    def case(self, name: str, text: str, images: list[Image.Image], max_tokens: int) -> Case:
        """The renderer's work, through the envelope, as the engine takes it."""
        parts: list[ContentPart] = [ImagePart(ImageURL("")) for _ in images]
        loaded = [DecodedImage(image, f"{name} {i}") for i, image in enumerate(images)]
        rendered = render(self.processor, [Message("user", [*parts, TextPart(text)])], loaded)
        return make_case(name, rendered, images, max_tokens)

    def expected(self, text: str, images: list[Image.Image], max_tokens: int) -> list[int]:
        content = [*({"type": "image", "image": image} for image in images)]
        inputs = self.own.apply_chat_template(
            [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        answer = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        answer_ids: list[int] = answer[0, inputs["input_ids"].shape[1] :].tolist()
        return answer_ids

    @functools.cache  # noqa: B019
    def cases(self) -> tuple[list[Case], dict[str, list[int]]]:
        """At most 64 tokens each, and what transformers answers."""
        questions = {
            "text": ("Who?", [], 24),
            "one": ("See?", [llava.draw_image(1, 90, 60)], 20),
            "two": ("é", [llava.draw_image(2, 42, 120), llava.draw_image(3, 33, 21)], 12),
            "short": ("", [], 30),
        }
        answers = {name: self.expected(*question) for name, question in questions.items()}
        assert all(len(set(answer)) > 5 for answer in answers.values()), "or it would prove little"
        return [self.case(name, *question) for name, question in questions.items()], answers


SETTINGS = {
    "one layer": {},
    "one layer with its class token, pictures touching": {
        "layer": -1,
        "strategy": "full",
        "template": TOUCHING,
    },
    "several layers": {"layer": [-1, 0, -3]},
    "several layers with their class tokens": {"layer": [1, -2], "strategy": "full"},
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=list(SETTINGS))
def road(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Road:
    return Road(tmp_path_factory.mktemp("llava"), **request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Road:
    return Road(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("budget", [7, pytest.param(13, marks=pytest.mark.long), 512])
def test_core_yields_the_tokens_of_generate(road: Road, budget: int) -> None:
    cases, expected = road.cases()
    answers, runner = run_core(road.twins, cases, num_blocks=64, budget=budget, steps_between=3)
    assert answers == expected
    assert max(runner.batch_sizes) > 1


def test_preempted_requests_yield_the_tokens_of_generate(road: Road) -> None:
    cases, expected = road.cases()
    answers, runner = run_core(road.twins, cases, num_blocks=17, budget=64, steps_between=0)
    assert answers == expected
    assert max(runner.num_starts.values()) > 1


def test_any_schedule_yields_the_tokens_of_generate(road: Road) -> None:
    cases, expected = road.cases()
    schedule = RandomSchedule(random.Random(1), 51, 5, max_chunk=13, preempt_share=0.05)
    assert run_schedule(road.twins, cases, schedule) == expected
    assert schedule.num_preemptions > 0


def test_images_change_the_output(plain: Road) -> None:
    first, second = (plain.expected("See?", [llava.draw_image(n, 90, 60)], 12) for n in (1, 9))
    assert first != second


def test_images_that_touch_are_separate(tmp_path: Path) -> None:
    road = Road(tmp_path, template=TOUCHING)
    images = [llava.draw_image(4, 50, 50), llava.draw_image(5, 50, 50)]
    case = road.case("touching", "", images, 8)
    first, second = case.request.items
    assert first.placeholder.offset + first.placeholder.length == second.placeholder.offset
    answers, _ = run_core(road.twins, [case], num_blocks=16, budget=13, steps_between=0)
    assert answers == {"touching": road.expected("", images, 8)}
    assert answers["touching"] != road.expected("", images[::-1], 8)


def with_rows(case: Case, newline: int, width: int) -> Case:
    """Text after every `width` tokens of each image, as other families mark the ends of rows."""
    token_ids: list[int] = []
    items = []
    end = 0
    for item in case.request.items:
        start, length = item.placeholder.offset, item.placeholder.length
        token_ids += case.request.prompt_token_ids[end:start]
        run: list[int] = []
        for i in range(length):
            run.append(case.request.prompt_token_ids[start + i])
            if i % width == width - 1:
                run.append(newline)
        mask = pack_mask([token_id != newline for token_id in run])
        items.append(replace(item, placeholder=PlaceholderRange(len(token_ids), len(run), mask)))
        token_ids += run
        end = start + length
    token_ids += case.request.prompt_token_ids[end:]
    return Case(replace(case.request, prompt_token_ids=token_ids, items=items), case.images)


@pytest.mark.parametrize("budget", [5, 7, 512])
def test_text_within_an_image_stays_text(plain: Road, budget: int) -> None:
    """A mask marks the text within a placeholder; transformers looks for image tokens."""
    images = [llava.draw_image(1, 90, 60), llava.draw_image(2, 42, 42)]
    case = with_rows(plain.case("rows", "See?", images, 12), newline=7, width=3)
    token_ids = torch.tensor([case.request.prompt_token_ids])
    pixels = plain.own.image_processor(images, return_tensors="pt")
    answer = plain.model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **pixels,
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )[0, token_ids.shape[1] :].tolist()
    answers, _ = run_core(plain.twins, [case], num_blocks=64, budget=budget, steps_between=0)
    assert answers == {"rows": answer}


@pytest.mark.parametrize("mask", [b"", b"\xff", b"\x00\x00", b"\xff\xff\xff", b"\xff\x1f"])
def test_a_mask_that_does_not_fit_is_refused_at_the_door(plain: Road, mask: bytes) -> None:
    case = with_rows(plain.case("rows", "See?", [llava.draw_image(1, 42, 42)], 4), 7, 3)
    (item,) = case.request.items
    spoilt = replace(item, placeholder=PlaceholderRange(item.placeholder.offset, 12, mask))
    with pytest.raises(InvalidRequest, match="is_embed"):
        run_core(
            plain.twins,
            [Case(replace(case.request, items=[spoilt]), [])],
            num_blocks=64,
            budget=64,
            steps_between=0,
        )


def test_a_mask_elsewhere_is_the_requests_own_failure(plain: Road) -> None:
    case = with_rows(plain.case("rows", "See?", [llava.draw_image(1, 42, 42)], 4), 7, 3)
    (item,) = case.request.items
    mask = pack_mask([True] * 9 + [False] * 3)
    moved = replace(item, placeholder=PlaceholderRange(item.placeholder.offset, 12, mask))
    with pytest.raises(InvalidRequest, match="image tokens"):
        plain.twins.served.family.check(replace(case.request, items=[moved]))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"pixels": None},
        {"pixels": torch.zeros(3, 42, 42)},
        {"pixels": torch.zeros(3, 42, 56, dtype=torch.uint8)},
        {"pixels": torch.zeros(1, 42, 42, dtype=torch.uint8)},
        {"pixels": torch.zeros(1, 3, 42, 42, dtype=torch.uint8)},
        {"pixel_table": None},
        {"pixel_table": torch.zeros(3, 255)},
        {"pixel_table": torch.zeros(3, 256, dtype=torch.float64)},
        {"pixel_table": torch.full((3, 256), float("nan"))},
    ],
)
def test_malformed_fields_fail_only_their_request(plain: Road, fields: dict[str, Any]) -> None:
    request = plain.case("spoilt", "See?", [llava.draw_image(1, 42, 42)], 4).request
    runner = ModelRunner(plain.twins.served, 4, 4, plain.twins.tower)
    runner.check(request)
    (item,) = request.items
    changed = {k: v for k, v in {**item.fields, **fields}.items() if v is not None}
    with pytest.raises(InvalidRequest):
        runner.check(replace(request, items=[replace(item, fields=changed)]))


def test_placeholders_must_be_where_the_item_says(plain: Road) -> None:
    request = plain.case("moved", "See?", [llava.draw_image(1, 42, 42)], 4).request
    (item,) = request.items
    offset, length = item.placeholder.offset, item.placeholder.length
    family = plain.twins.served.family
    for start, count in [(offset + 1, length), (offset, length - 1), (-5, length), (900, length)]:
        moved = replace(item, placeholder=PlaceholderRange(start, count))
        with pytest.raises(InvalidRequest):
            family.check(replace(request, items=[moved]))
    with pytest.raises(UnsupportedContent, match="video"):
        family.check(replace(request, items=[replace(item, modality="video")]))


def test_embeddings_of_an_encoder_take_the_images_place(plain: Road) -> None:
    """An item with the embeddings of another tower, without its pixels."""
    image = llava.draw_image(1, 90, 60)
    case = plain.case("encoded", "See?", [image], 12)
    assert plain.twins.tower is not None
    (item,) = case.request.items
    (embedding,) = plain.twins.tower.encode([item.fields])
    request = replace(case.request, items=[replace(item, fields={}, embedding=embedding)])
    twins = Twins(plain.model, plain.twins.served, None)
    answers, _ = run_core(twins, [Case(request, [])], num_blocks=16, budget=13, steps_between=0)
    assert answers == {"encoded": plain.expected("See?", [image], 12)}


# -- loading --------------------------------------------------------------------------------------


def test_the_parts_together_are_the_whole(plain: Road) -> None:
    assert plain.twins.tower is not None
    whole = dict(plain.model.named_parameters())
    tower = dict(plain.twins.tower.model.named_parameters())
    rest = dict(plain.twins.served.family.model.named_parameters())
    assert {name.split(".")[1] for name in tower} == {"vision_tower", "multi_modal_projector"}
    assert not tower.keys() & rest.keys()
    assert (tower | rest).keys() == whole.keys()
    assert all(torch.equal(weight, whole[name]) for name, weight in (tower | rest).items())


def load_from(folder: Path) -> None:
    load(ModelConfig(str(folder)), EngineConfig(num_blocks=128, kernels="torch"))


def test_weights_by_the_names_of_published_folders(tmp_path: Path) -> None:
    llava.write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, file, metadata={"format": "pt"})
    load_from(tmp_path)


def test_a_missing_projector_is_named(tmp_path: Path) -> None:
    llava.write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {
        name: w for name, w in load_file(file).items() if "multi_modal_projector" not in name
    }
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="multi_modal_projector"):
        load_from(tmp_path)


@pytest.mark.parametrize("layer", [-5, 4, [-2, 4]])
def test_a_layer_that_the_tower_lacks_is_refused(plain: Road, layer: int | list[int]) -> None:
    config = llava.make_config(layer=layer, image_token_id=7)
    with pytest.raises(ConfigError, match="vision_feature_layer"):
        LlavaTower(config)


def test_other_towers_are_refused(tmp_path: Path) -> None:
    llava.write_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["model_type"] = "siglip_vision_model"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="siglip_vision_model"):
        load_from(tmp_path)
