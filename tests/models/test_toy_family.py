"""A family that exists in this file only: one declaration is all that the workers need.

The toy model encodes a raster in a CLIP tower with an added bias, has a placeholder token with
another name, and gives all tokens of an image one position. It answers token for token as
transformers' `generate` does.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from ops.rendering import render
from shared.codec.arrays import from_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, WireField, decode_item, encode_item
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import InvalidRequest
from shared.models import layout, wire_pixels
from shared.models.family import MediaInput, ModelFamily
from shared.models.language import LanguageAdapter, MediaPrompt, PromptPositions
from shared.models.media import DecodedImage
from shared.models.registry import register
from shared.models.tower import load_tower
from shared.models.tower_adapter import Fields, TowerAdapter, get_field, look_up
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from tests import llava
from tests.engine.model.test_parity import Case, Twins, run_core
from tests.models.rig import make_case
from workers.engine.loader import load
from workers.engine.model.flat_model import FlatModel
from workers.renderer.processing.processor import Processor

pytestmark = pytest.mark.usefixtures("one_thread")

SIDE, NUM_TOKENS = llava.IMAGE_SIZE, 10
# It writes tools, and shows no mark of a format.
TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool }}{% endfor %}" + llava.CHAT_TEMPLATE


# -- the model, as transformers has it ------------------------------------------------------------


class ToyConfig(LlavaConfig):
    model_type = "toy_vl"
    attribute_map = {"image_token_id": "look_here_id"}  # noqa: RUF012
    look_here_id: int = 0


class ToyForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = ToyConfig

    def forward(
        self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if input_ids is not None:
            num_past = kwargs["past_key_values"].get_seq_length()
            if num_past == 0:
                kwargs["position_ids"] = stack(input_ids[0], self.config.look_here_id)[None]
                self.delta = int(kwargs["position_ids"].max()) + 1 - input_ids.shape[1]
            else:
                kwargs["position_ids"] = torch.tensor([[num_past + self.delta]])
        return super().forward(input_ids, pixel_values, **kwargs)


def stack(token_ids: Tensor, placeholder_id: int) -> Tensor:
    """Return the positions of tokens, when each run of placeholders stands at one position."""
    is_image = token_ids == placeholder_id
    repeats = is_image & is_image.roll(1)
    repeats[0] = False
    return (~repeats).long().cumsum(0) - 1


AutoConfig.register("toy_vl", ToyConfig)
AutoModelForImageTextToText.register(ToyConfig, ToyForConditionalGeneration)


# -- the family, as the workers have it -----------------------------------------------------------


class ToyLayout(layout.ImageLayout):
    """One field: raster [height, width, channels] uint8."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = layout.load_image_processor(folder, CLIPImageProcessorPil)
        self.fingerprint = layout.fingerprint(self._processor)

    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        output = self._processor(images=[media.image], do_rescale=False, do_normalize=False)
        raster = np.ascontiguousarray(output["pixel_values"][0].transpose(1, 2, 0), np.uint8)
        table = layout.value_table(self._processor)
        return {"raster": from_numpy(raster), "table": from_numpy(table)}, NUM_TOKENS

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        return {name: WireField(tensor, BatchedField()) for name, tensor in fields.items()}

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        raster, table = wire_pixels.tensors_of(wire, ("raster", "table"), field)
        wire_pixels.check_shape("raster", raster, (SIDE, SIDE, 3), field)
        return {"raster": raster, "table": table}, NUM_TOKENS


class ToyTower(TowerAdapter):
    modules = ("model.vision_tower", "model.multi_modal_projector")

    def count(self, fields: Fields) -> int:
        return NUM_TOKENS

    def check(self, fields: Fields) -> None:
        get_field(fields, "raster", torch.uint8, (SIDE, SIDE, 3))
        get_field(fields, "table", torch.float32, (3, 256))

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        values = [
            look_up(fields["raster"].permute(2, 0, 1).flatten(1), fields["table"])
            for fields in batch
        ]
        pixel_values = torch.stack(values).view(-1, 3, SIDE, SIDE)
        return list(model.get_image_features(pixel_values).pooler_output)

    def sample(self) -> Fields:
        raster = torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8)
        return {"raster": raster, "table": torch.zeros(3, 256)}


class ToyAdapter(LanguageAdapter):
    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        token_ids = torch.tensor(prompt.prompt_token_ids)
        positions = stack(token_ids, self.model.config.look_here_id)
        return PromptPositions(positions[None], int(positions[-1]) + 1 - len(token_ids))


register(
    ModelFamily(
        "Toy",
        frozenset({"toy_vl"}),
        media={IMAGE: MediaInput(ToyLayout, placeholder="look_here_id")},
        tower=ToyTower,
        language=ToyAdapter,
        tool_format="hermes",
    )
)


# -- the proof ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = llava.make_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(llava.PREPROCESSOR))
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    look_here_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = ToyConfig(
        text_config=llava.TEXT | special | {"vocab_size": len(tokenizer)},
        vision_config=llava.VISION,
        look_here_id=look_here_id,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    model = ToyForConditionalGeneration(config).eval()
    llava.widen(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor(ModelConfig(str(folder)))


@pytest.fixture(scope="module")
def twins(folder: Path) -> Twins:
    reference = ToyForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    loaded = load(ModelConfig(str(folder)), EngineConfig(num_blocks=128, kernels="torch"))
    assert isinstance(loaded.model, FlatModel)
    return Twins(reference.eval().requires_grad_(False), loaded.model, loaded.tower)


def messages(text: str, images: Sequence[Image.Image]) -> list[Message]:
    return [Message("user", [*(ImagePart(ImageURL("")) for _ in images), TextPart(text)])]


def generate(twins: Twins, folder: Path, text: str, images: list[Image.Image]) -> list[int]:
    """Return the answer of transformers, from its own tokenizer and image processor."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prompt = prompt.replace("<image>", "<image>" * NUM_TOKENS)
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    if images:
        own = AutoImageProcessor.from_pretrained(folder, backend="pil")
        inputs["pixel_values"] = own(images=images, return_tensors="pt")["pixel_values"]
    reference: Any = twins.reference
    answer = reference.generate(
        **inputs, do_sample=False, min_new_tokens=16, max_new_tokens=16, pad_token_id=0
    )
    answer_ids: list[int] = answer[0, inputs["input_ids"].shape[1] :].tolist()
    return answer_ids


@pytest.mark.parametrize("budget", [7, 512])
def test_a_family_of_one_file_gives_the_tokens_of_generate(
    folder: Path, processor: Processor, twins: Twins, budget: int
) -> None:
    questions: dict[str, tuple[str, list[Image.Image]]] = {
        "text": ("Who?", []),
        "one": ("See?", [llava.draw_image(1, 90, 60)]),
        "two": ("Both?", [llava.draw_image(2, 42, 120), llava.draw_image(3, 33, 21)]),
    }
    cases: list[Case] = []
    for name, (text, images) in questions.items():
        decoded = [DecodedImage(image, f"{name} {i}") for i, image in enumerate(images)]
        rendered = render(processor, messages(text, images), decoded)
        cases.append(make_case(name, rendered, images, max_tokens=16))
    answers, _ = run_core(twins, cases, num_blocks=64, budget=budget, steps_between=3)
    expected = {name: generate(twins, folder, *question) for name, question in questions.items()}
    assert answers == expected
    assert all(len(set(answer)) > 5 for answer in expected.values()), "or it would prove little"


def test_all_tokens_of_an_image_stand_at_one_position(processor: Processor, twins: Twins) -> None:
    images = [llava.draw_image(1, 90, 60)]
    rendered = render(processor, messages("See?", images), [DecodedImage(images[0], "one")])
    prompt = make_case("one", rendered, images, max_tokens=16).request
    positions = twins.served.family.locate(prompt)
    assert positions is not None
    assert positions.delta == 1 - NUM_TOKENS
    assert len(positions.prompt[0].unique()) == len(prompt.prompt_token_ids) - (NUM_TOKENS - 1)


def test_its_tower_loads_alone(folder: Path) -> None:
    tower = load_tower(folder, torch.float32, "cpu")
    (embedding,) = tower.encode([tower.adapter.sample()])
    assert embedding.shape == (NUM_TOKENS, tower.adapter.width)


def test_its_items_pass_between_servers(processor: Processor) -> None:
    picture = processor.process(DecodedImage(llava.draw_image(1, 90, 60), "one"), "field", "")
    data, _ = processor.encode_item(picture)
    assert processor.decode_item(IMAGE, data, picture.mm_hash, "field") == picture
    wire = decode_item(data, "field")
    with pytest.raises(InvalidRequest, match="has the fields raster, table"):
        processor.decode_item(IMAGE, encode_item({"raster": wire["raster"]}), "hash", "field")


def test_its_tool_format_stands_in_for_a_template_without_marks(processor: Processor) -> None:
    card = processor.card("toy")
    assert (card.takes_tools, card.tool_parser) == (True, "hermes")


def test_a_card_has_the_media_of_the_family_alone(processor: Processor) -> None:
    assert processor.card("toy").media == [IMAGE]


def test_a_model_type_belongs_to_one_family() -> None:
    with pytest.raises(ValueError, match="toy_vl belongs to another family"):
        register(ModelFamily("Another", frozenset({"toy_vl"})))
