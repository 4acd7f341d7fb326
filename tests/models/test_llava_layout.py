"""LLaVA's prompts and images against transformers' own processor."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, LlavaProcessor

from ops.rendering import render
from shared.codec.tensors import to_torch
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import ConfigError, InvalidMedia, InvalidRequest
from shared.models.families.llava import LlavaTower
from shared.models.media import DecodedImage
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from tests import llava
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.processing.processor import Processor

SIDE = llava.IMAGE_SIZE
SIZES = [(1, 1), (1, 27), (27, 1), (42, 42), (41, 43), (200, 1), (61, 437), (640, 480), (13, 900)]
SETTINGS = {
    "as LLaVA's": {},
    "a crop of something larger": {"size": {"shortest_edge": 61}},
    "no crop": {"do_center_crop": False, "size": {"height": SIDE, "width": SIDE}},
    "no resize": {"do_resize": False},
    "no rescale": {"do_rescale": False},
    "no normalize": {"do_normalize": False},
    "neither": {"do_rescale": False, "do_normalize": False},
    "other numbers": {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.7, 0.8, 0.9],
        "rescale_factor": 1 / 127.5,
        "resample": 2,
    },
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=list(SETTINGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    llava.write_processor(path, **request.param)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    llava.write_processor(path)
    return path


def image() -> ImagePart:
    return ImagePart(ImageURL(""))


def restored(folder: Path, image: DecodedImage) -> torch.Tensor:
    """Return the pixel values that the tower is given for an image."""
    fields = Processor(ModelConfig(str(folder))).process(image, "field", "").fields
    vision = LlavaTower(AutoConfig.from_pretrained(folder))
    opened = {name: to_torch(tensor) for name, tensor in fields.items()}
    vision.check(opened)
    return vision.restore(opened)


def expected(folder: Path, image: Image.Image) -> torch.Tensor:
    """transformers' own image processor, in its ordinary use; on bytes it leaves bytes."""
    own = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels: torch.Tensor = own(images=[image], return_tensors="pt")["pixel_values"][0]
    return pixels.to(torch.float32)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype == torch.float32
    assert torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("size", SIZES)
def test_the_processors_output_is_restored_bit_for_bit(folder: Path, size: tuple[int, int]) -> None:
    picture = llava.draw_image(sum(size), *size)
    assert_same_bits(restored(folder, DecodedImage(picture, "")), expected(folder, picture))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_images_of_every_mode_are_restored(plain: Path, mode: str) -> None:
    picture = llava.draw_image(7, 70, 50)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    else:
        picture = picture.convert("RGBA").convert(mode)
    assert picture.mode == mode
    file = io.BytesIO()
    picture.save(file, "PNG")
    loaded = decode_image(file.getvalue(), RendererConfig(), "field")
    assert_same_bits(restored(plain, loaded), expected(plain, loaded.image))


def test_fields_have_the_promised_shapes(plain: Path) -> None:
    picture = Processor(ModelConfig(str(plain))).process(
        DecodedImage(llava.draw_image(1, 90, 60), "source"), "field", ""
    )
    assert {name: (t.dtype, t.shape) for name, t in picture.fields.items()} == {
        "pixels": ("uint8", (3, SIDE, SIDE)),
        "pixel_table": ("float32", (3, 256)),
    }
    assert picture.num_tokens == 9


# -- the prompt -----------------------------------------------------------------------------------

HELLO = Message("system", "Be kind.")
CONVERSATIONS = {
    "words": [Message("user", "Grüße, 世界!\n\n  x")],
    "system": [HELLO, Message("user", "a")],
    "blank": [Message("user", " ")],
    "pictures": [HELLO, Message("user", [TextPart("a"), image(), TextPart(" b"), image()])],
    "turns": [
        Message("user", [image(), TextPart("What?")]),
        Message("assistant", "This."),
        Message("user", [TextPart("And?"), image()]),
    ],
}


def own_ids(folder: Path, messages: list[Message], pictures: list[Image.Image]) -> list[int]:
    """Return LlavaProcessor's inputs for the same messages; it takes parts only."""
    left = iter(pictures)
    conversation: list[Any] = []
    for message in messages:
        content = message.content
        assert content is not None
        parts = [TextPart(content)] if isinstance(content, str) else content
        conversation.append(
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text}
                    if isinstance(part, TextPart)
                    else {"type": "image", "image": next(left)}
                    for part in parts
                ],
            }
        )
    own = LlavaProcessor.from_pretrained(folder, local_files_only=True)
    inputs: Any = own.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    return list(inputs["input_ids"][0])


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize(
    "template",
    [
        llava.CHAT_TEMPLATE,
        llava.CHAT_TEMPLATE.replace("<image>\n", "<image>"),
        "{{ bos_token }}" + llava.CHAT_TEMPLATE,
    ],
    ids=["as LLaVA's", "pictures touching", "with a BOS"],
)
def test_token_ids_equal_the_results_of_transformers_processor(
    tmp_path: Path, messages: list[Message], strategy: llava.Strategy, template: str
) -> None:
    config = llava.write_processor(tmp_path, strategy=strategy, template=template)
    rng = random.Random(3)
    num_images = sum(isinstance(part, ImagePart) for m in messages for part in m.content or [])
    pictures = [
        llava.draw_image(i, rng.randint(20, 90), rng.randint(20, 90)) for i in range(num_images)
    ]
    loaded = [DecodedImage(picture, str(i)) for i, picture in enumerate(pictures)]
    rendered = render(Processor(ModelConfig(str(tmp_path))), messages, loaded)
    ids = rendered.prompt_token_ids
    assert ids == own_ids(tmp_path, messages, pictures)
    assert ids.count(1) == 1, "a BOS, once"
    covered: list[int] = []
    for item in rendered.items:
        assert item.placeholder.length == (9 if strategy == "default" else 10)
        start = item.placeholder.offset
        covered += range(start, start + item.placeholder.length)
    assert covered == [i for i, token in enumerate(ids) if token == config.image_token_id]


@pytest.mark.parametrize("text", ["<image>", "<s>", "<s>Hi", "Hi</s>"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_control_tokens_in_text_are_refused(plain: Path, role: Any, text: str) -> None:
    """At the very beginning too, where a BOS of the template would stand."""
    with pytest.raises(InvalidRequest, match="control token"):
        render(Processor(ModelConfig(str(plain))), [Message(role, text)], [])


def test_a_template_in_its_older_file(plain: Path, tmp_path: Path) -> None:
    llava.write_processor(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for messages in ([HELLO, Message("user", "a")], [Message("user", [TextPart("a")])]):
        rendered = render(Processor(ModelConfig(str(tmp_path))), messages, [])
        assert rendered == render(Processor(ModelConfig(str(plain))), messages, [])
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        Processor(ModelConfig(str(tmp_path)))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(201, 1), (2, 500)])
def test_lines_are_refused_before_they_are_scaled(plain: Path, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMedia, match=f"{size[0]} x {size[1]}") as caught:
        Processor(ModelConfig(str(plain))).process(
            DecodedImage(llava.draw_image(0, *size), ""), "f", ""
        )
    assert caught.value.field == "f"


def changed(folder: Path, name: str, **values: Any) -> None:
    """`None` takes a value away."""
    settings = json.loads((folder / name).read_text()) | values
    present = {key: value for key, value in settings.items() if value is not None}
    (folder / name).write_text(json.dumps(present))


@pytest.mark.parametrize(
    ("file", "values", "complaint"),
    [
        ("processor_config.json", {"patch_size": None}, "patch_size"),
        ("processor_config.json", {"patch_size": 7}, "patch_size 7, but the vision tower has 14"),
        ("processor_config.json", {"patch_size": "14"}, "patch_size"),
        ("processor_config.json", {"num_additional_image_tokens": None}, "8 tokens.* 9 embedd"),
        ("processor_config.json", {"vision_feature_select_strategy": "full"}, "10 tokens"),
        (
            "processor_config.json",
            {"vision_feature_select_strategy": "cls"},
            "not one of",
        ),
        ("config.json", {"vision_feature_select_strategy": "full"}, "9 tokens.* 10 embeddings"),
        ("config.json", {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip"),
        ("config.json", {"model_type": "ovis2"}, "not supported .*'ovis2'.*more tokens than"),
        ("preprocessor_config.json", {"image_processor_type": "LlavaNextImageProcessor"}, "Next"),
        ("preprocessor_config.json", {"do_center_crop": False}, r"\[3, 42, 63\]"),
        ("preprocessor_config.json", {"crop_size": {"height": 56, "width": 56}}, r"\[3, 56, 56\]"),
        (
            "preprocessor_config.json",
            {
                "do_center_crop": False,
                "size": {"height": 28, "width": 42},
                "do_pad": True,
                "pad_size": {"height": SIDE, "width": SIDE},
            },
            "more than rescale",
        ),
    ],
)
def test_settings_that_contradict_the_model_are_refused(
    tmp_path: Path, file: str, values: dict[str, Any], complaint: str
) -> None:
    llava.write_processor(tmp_path)
    changed(tmp_path, file, **values)
    with pytest.raises(ConfigError, match=complaint) as caught:
        Processor(ModelConfig(str(tmp_path)))
    assert caught.value.field == "path"
    assert str(tmp_path) in str(caught.value)


def test_a_missing_processor_config_is_named(tmp_path: Path) -> None:
    llava.write_processor(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"processor_config\.json"):
        Processor(ModelConfig(str(tmp_path)))


def test_images_of_other_settings_have_other_names(plain: Path, tmp_path: Path) -> None:
    names = {Processor(ModelConfig(str(plain))).hash_media(IMAGE, "source", "")}
    others: list[dict[str, Any]] = [{"resample": 2}, {"strategy": "full"}]
    for number, settings in enumerate(others):
        folder = tmp_path / str(number)
        llava.write_processor(folder, **settings)
        names.add(Processor(ModelConfig(str(folder))).hash_media(IMAGE, "source", ""))
    assert len(names) == 3
