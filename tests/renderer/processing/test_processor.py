import io
import json
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from ops.rendering import render
from shared.codec.envelope import TensorData, decode, encode
from shared.codec.tensors import to_torch
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import (
    ConfigError,
    ContextTooLong,
    InvalidMedia,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
)
from shared.models.media import DecodedImage
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import ContentPart, ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.task_messages import EngineBody, Task
from tests.tasks import engine_task
from workers.renderer.media.image_decoder import decode_image, hash_source
from workers.renderer.processing.processor import Processor, Rendered
from workers.renderer.processing.tokenizer import PromptTokenizer

SPECIALS = ["<|end|>", "<|start|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and loop.index0 > 0 %}"
    "{{ raise_exception('The system speaks first.') }}{% endif %}"
    "{{ '<|start|>' + m.role + '\\n' }}" + CONTENT + "{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
TEXT_TEMPLATE = TEMPLATE.replace(CONTENT, "{{ '' + m.content }}")
VISION = {"model_type": "qwen2_vl", "text_config": {"max_position_embeddings": 4096}}
TEXT = {"model_type": "qwen2", "max_position_embeddings": 256}
MAX_PIXELS = 28 * 28 * 100


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    template: str,
    normalizer: normalizers.Normalizer | None = None,
) -> Path:
    """A model folder without weights; the tokenizer knows single bytes and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    normalized = normalizer is not None
    tokenizer.add_special_tokens([AddedToken(s, normalized=normalized) for s in SPECIALS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    if config is VISION:
        config = VISION | {"image_token_id": tokenizer.token_to_id("<|image_pad|>")}
        pictures = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS},
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision"), VISION, TEMPLATE)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor(ModelConfig(str(folder)))


@pytest.fixture(scope="module")
def text_processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = write_model(tmp_path_factory.mktemp("text"), TEXT, TEXT_TEMPLATE)
    return Processor(ModelConfig(str(folder)))


@pytest.fixture(scope="module")
def reference(folder: Path) -> BaseImageProcessor:
    """transformers' own image processor, in its ordinary use."""
    processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor


def loaded(size: tuple[int, int] = (60, 40), seed: int = 0, mode: str = "RGB") -> DecodedImage:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return DecodedImage(Image.fromarray(pixels), f"{size} {seed} {mode}")


def image() -> ImagePart:
    return ImagePart(ImageURL("data:,"))


def user(*parts: str | ImagePart) -> Message:
    return Message("user", [TextPart(p) if isinstance(p, str) else p for p in parts])


def text_of(processor: Processor, token_ids: list[int]) -> str:
    return processor.tokenizer.decode(token_ids)


# ---------------------------------------------------------------------------------------------
# text


def test_the_prompt_is_what_transformers_makes_of_the_template(
    folder: Path, processor: Processor
) -> None:
    messages = [Message("system", "Be kind."), Message("user", "Grüße, 世界!\n\n  x")]
    rendered = render(processor, messages, [])
    conversation = [{"role": m.role, "content": m.content} for m in messages]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert rendered.prompt_token_ids == expected["input_ids"]
    assert (rendered.items, rendered.tensors) == ([], [])
    text = text_of(processor, rendered.prompt_token_ids)
    assert text.endswith("x<|end|>\n<|start|>assistant\n")


def test_a_text_model_takes_parts_and_refuses_images(text_processor: Processor) -> None:
    ids = render(text_processor, [user("a", "b")], []).prompt_token_ids
    assert "user\na\nb<|end|>" in text_of(text_processor, ids)
    with pytest.raises(UnsupportedContent) as caught:
        render(text_processor, [user("a", image())], [loaded()])
    assert caught.value.field == "messages[0].content[1].image_url.url"


def test_an_image_model_may_have_a_template_for_texts(tmp_path: Path) -> None:
    for template in (TEXT_TEMPLATE, TEXT_TEMPLATE.replace("'' + m.content", "m.content")):
        processor = Processor(ModelConfig(str(write_model(tmp_path, VISION, template))))
        rendered = render(processor, [user("a", image(), "b")], [loaded()])
        (item,) = rendered.items
        range_ = item.placeholder
        text = text_of(processor, rendered.prompt_token_ids)
        assert text.count("<|image_pad|>") == range_.length
        assert "user\na\n<|image_pad|>" in text
        assert "<|image_pad|>\nb<|end|>" in text


@pytest.mark.parametrize("token", SPECIALS)
@pytest.mark.parametrize("place", ["{}", "see {}?", "{}{}"])
def test_control_tokens_in_text_are_refused(processor: Processor, token: str, place: str) -> None:
    text = place.format(token, token)
    for message in (Message("user", text), user(text), user(image(), text)):
        with pytest.raises(InvalidRequest, match="control token") as caught:
            render(processor, [Message("system", "s"), message], [loaded()])
        assert caught.value.field == "messages[1].content"
        assert token in str(caught.value)


def test_a_control_token_split_over_two_parts_is_refused(processor: Processor) -> None:
    with pytest.raises(InvalidRequest, match=r"<\|image_pad\|>"):
        render(processor, [user("<|image_", "pad|>")], [])


def test_a_typed_placeholder_cannot_take_an_images_place(processor: Processor) -> None:
    with pytest.raises(InvalidRequest, match="control token"):
        render(processor, [user("<|image_pad|>", image())], [loaded()])


@pytest.mark.parametrize(
    "text", ["\uff1c|image_pad|\uff1e", "<|image\u200b_pad|>", "<|Image_Pad|>", "<|"]
)
def test_lookalikes_are_plain_text(processor: Processor, text: str) -> None:
    plain = render(processor, [user(text)], []).prompt_token_ids
    assert text in text_of(processor, plain)


def test_lookalikes_that_the_normaliser_resolves_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, VISION, TEMPLATE, normalizers.NFKC())
    strict = Processor(ModelConfig(str(folder)))
    with pytest.raises(InvalidRequest, match="control token"):
        render(strict, [user("\uff1c|image_pad|\uff1e")], [])


def test_tokens_that_only_the_template_joins_are_refused(tmp_path: Path) -> None:
    joining = TEMPLATE.replace("{{ m.content }}", "{{ m.content | replace('-', '') }}")
    processor = Processor(ModelConfig(str(write_model(tmp_path, VISION, joining))))
    with pytest.raises(InvalidRequest, match="control token"):
        render(processor, [Message("user", "<|image-_pad|>")], [])


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_empty_and_blank_texts_are_rendered(processor: Processor, text: str) -> None:
    assert render(processor, [Message("user", text)], []).prompt_token_ids


def test_a_refusal_by_the_template_is_the_clients_fault(processor: Processor) -> None:
    with pytest.raises(InvalidRequest, match="The system speaks first"):
        render(processor, [Message("user", "a"), Message("system", "b")], [])


def test_a_prompt_leaves_room_for_one_token(folder: Path) -> None:
    fits = render(Processor(ModelConfig(str(folder))), [Message("user", "abc")], [])
    length = len(fits.prompt_token_ids)
    render(
        Processor(ModelConfig(str(folder), max_model_len=length + 1)), [Message("user", "abc")], []
    )
    with pytest.raises(ContextTooLong, match=f"{length} tokens .* {length}$") as caught:
        render(
            Processor(ModelConfig(str(folder), max_model_len=length)), [Message("user", "abc")], []
        )
    assert caught.value.field == "messages"


def test_a_prompt_to_embed_needs_no_room_for_an_answer(folder: Path) -> None:
    processor = Processor(ModelConfig(str(folder), max_model_len=9))
    processor.expand([5] * 9, [], embeds=True)
    assert processor.check_features(Prompt(token_ids=[5] * 9), embeds=True) == []
    for embeds, excess in ((True, "10 tokens are more than"), (False, "9 tokens leave no room")):
        with pytest.raises(ContextTooLong, match=excess):
            processor.check_len([5] * (9 + embeds), "prompt", embeds)


def test_endless_text_is_refused_without_tokenizing(
    text_processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_processor.tokenizer, "encode", None)
    with pytest.raises(ContextTooLong, match=r"50000000 bytes .* 256 tokens"):
        render(text_processor, [Message("user", "a" * 50_000_000)], [])


@pytest.mark.parametrize("unit", [" ", "@", "e\u0301", "世"], ids=ascii)
def test_tokenizing_takes_linear_work(processor: Processor, unit: str) -> None:
    def work_on(num_units: int) -> tuple[int, int]:
        """Return the number of calls, and the length of all texts that become tokens."""
        events: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            events[event] += 1
            if event == "call" and frame.f_code is PromptTokenizer.encode.__code__:
                events["characters"] += len(frame.f_locals["text"])

        prompt = Prompt([Message("user", unit * num_units)])
        sys.setprofile(count)
        try:
            token_ids = processor.tokenizer.tokenize(prompt)
        finally:
            sys.setprofile(None)
        assert len(token_ids) >= num_units
        return events["call"] + events["c_call"], events["characters"]

    work_on(1)  # The first text compiles the template.
    calls, characters = work_on(10_000)
    more_calls, more_characters = work_on(20_000)
    assert more_calls < 2.1 * calls
    assert characters < more_characters < 2.1 * characters


# ---------------------------------------------------------------------------------------------
# images

SIZES = [(1, 1), (1, 27), (27, 1), (28, 28), (27, 29), (56, 56), (200, 1), (61, 437), (640, 480)]


def restored(
    task: Rendered, tensors: list[TensorData]
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    """Restore values as the engine does: by the table, frame repeated; [patches, values]."""
    for item in task.items:
        patches, table, grid = (
            to_torch(tensors[item.fields[name]])
            for name in ("pixel_patches", "pixel_table", "image_grid_thw")
        )
        values = np.stack([table.numpy()[c][patches.numpy()[:, c]] for c in range(3)], axis=1)
        frames = np.repeat(values[:, :, None], 2, axis=2)
        yield frames.reshape(len(values), -1), grid.numpy()


@pytest.mark.parametrize("size", SIZES)
def test_the_engine_can_restore_the_processors_output_bit_for_bit(
    processor: Processor, reference: BaseImageProcessor, size: tuple[int, int]
) -> None:
    picture = loaded(size)
    rendered = render(processor, [user(image())], [picture])
    expected = reference(images=[picture.image], return_tensors="np")
    [(values, grid)] = restored(rendered, rendered.tensors)
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), expected["pixel_values"].view(np.uint32))
    assert np.array_equal(grid, expected["image_grid_thw"][0])
    assert rendered.items[0].placeholder.length == grid.prod() // 4


def test_every_image_fills_its_own_placeholder(processor: Processor) -> None:
    pictures = [loaded((60, 40)), loaded((300, 200)), loaded((28, 90))]
    messages = [user("one", image(), "two", image()), user(image(), "three")]
    rendered = render(processor, messages, pictures)
    pad = processor.placeholder_ids[IMAGE]
    ids = rendered.prompt_token_ids
    for picture, item in zip(pictures, rendered.items, strict=True):
        alone = render(processor, [user(image())], [picture])
        assert item.mm_hash == alone.items[0].mm_hash
        assert item.placeholder.length == alone.items[0].placeholder.length
        start, end = item.placeholder.offset, item.placeholder.offset + item.placeholder.length
        assert set(ids[start:end]) == {pad}
        assert pad not in (ids[start - 1], ids[end])
        for name, index in item.fields.items():
            assert rendered.tensors[index] == alone.tensors[alone.items[0].fields[name]]
    assert ids.count(pad) == sum(item.placeholder.length for item in rendered.items)
    assert sorted(i for item in rendered.items for i in item.fields.values()) == list(range(9))


def test_fields_have_the_promised_shapes_and_cross_the_envelope(processor: Processor) -> None:
    rendered = render(processor, [user(image())], [loaded((56, 84))])
    task = engine_task("r", rendered.prompt_token_ids, rendered.items)
    received, tensors = decode(encode(task, rendered.tensors), Task[EngineBody])
    assert received == task
    assert tensors == rendered.tensors
    fields = {name: tensors[index] for name, index in task.body.items[0].fields.items()}
    assert {name: (t.dtype, t.shape) for name, t in fields.items()} == {
        "pixel_patches": ("uint8", (24, 3, 196)),
        "pixel_table": ("float32", (3, 256)),
        "image_grid_thw": ("int64", (3,)),
    }


def test_settings_of_the_processor_are_honoured(tmp_path: Path) -> None:
    write_model(tmp_path, VISION, TEMPLATE)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]}
    path.write_text(json.dumps(settings))
    reference = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    rendered = render(Processor(ModelConfig(str(tmp_path))), [user(image())], [loaded()])
    expected = reference(images=[loaded().image], return_tensors="np")["pixel_values"]
    assert np.array_equal(next(restored(rendered, rendered.tensors))[0], expected)


def file_of(image: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def upside_down() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif


def other_palette(image: Image.Image) -> Image.Image:
    image = image.copy()
    palette = image.getpalette()
    assert palette is not None
    image.putpalette([255 - value for value in palette])
    return image


def test_different_images_have_different_hashes(processor: Processor, tmp_path: Path) -> None:
    stripes = np.arange(30 * 150 * 3, dtype=np.uint32).astype(np.uint8)
    picture, paletted = loaded().image, loaded().image.quantize(16)
    files = [
        file_of(picture),
        file_of(loaded(seed=1).image),
        file_of(picture.convert("L")),
        file_of(picture, "JPEG"),
        file_of(picture, "JPEG", exif=upside_down()),
        file_of(picture.convert("CMYK"), "JPEG"),
        file_of(Image.fromarray(stripes.reshape(30, 150, 3))),
        file_of(Image.fromarray(stripes.reshape(150, 30, 3))),
        file_of(picture.transpose(Image.Transpose.ROTATE_90)),
        file_of(paletted),
        file_of(other_palette(paletted)),
        file_of(paletted, transparency=0),
    ]
    images = [decode_image(data, RendererConfig(), "field") for data in files]
    hashes = [processor.process(image, "field", "").mm_hash for image in images]
    assert len(set(hashes)) == len(files)
    assert all(len(h) == 64 for h in hashes)
    again = decode_image(files[0], RendererConfig(), "field")
    assert processor.process(again, "field", "").mm_hash == hashes[0]
    source_hash = hash_source(files[0])
    assert processor.hash_media(IMAGE, source_hash, "") == hashes[0], "known before it is decoded"
    write_model(tmp_path, VISION, TEMPLATE)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(path.read_text().replace(str(MAX_PIXELS), str(MAX_PIXELS * 2)))
    other = Processor(ModelConfig(str(tmp_path)))
    assert other.hash_media(IMAGE, source_hash, "") != hashes[0]


@pytest.mark.parametrize("size", [(201, 1), (2, 500)])
def test_images_too_narrow_for_the_model_are_refused(
    processor: Processor, size: tuple[int, int]
) -> None:
    with pytest.raises(InvalidMedia, match=f"{size[0]} x {size[1]}") as caught:
        render(processor, [user("a", image())], [loaded(size)])
    assert caught.value.field == "messages[0].content[1].image_url.url"


def test_too_many_images_are_refused_before_any_is_loaded(folder: Path) -> None:
    processor = Processor(ModelConfig(str(folder), max_images=1))
    with pytest.raises(MediaTooLarge, match="limit of 1 ") as caught:
        processor.check([user(image()), user(image())])
    assert caught.value.field == "messages[1].content[0].image_url.url"
    with pytest.raises(MediaTooLarge):
        Processor(ModelConfig(str(folder), max_images=0)).check([user(image())])


def test_images_count_towards_the_context(folder: Path) -> None:
    processor = Processor(ModelConfig(str(folder), max_model_len=100))
    with pytest.raises(ContextTooLong, match=r"in the model's 100$"):
        render(processor, [user(image())], [loaded((280, 280))])


def test_a_template_that_drops_an_image_is_an_error(tmp_path: Path) -> None:
    silent = TEMPLATE.replace("<|image_pad|>", "")
    processor = Processor(ModelConfig(str(write_model(tmp_path, VISION, silent))))
    with pytest.raises(InvalidRequest, match="0 placeholders"):
        render(processor, [user(image())], [loaded()])


def test_many_threads_render_as_one_does(processor: Processor) -> None:
    rng = random.Random(0)
    requests = [
        ([user("q" * rng.randint(1, 300), image())], [loaded((rng.randint(20, 90), 50), seed=i)])
        for i in range(40)
    ]
    alone = [render(processor, *request) for request in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda request: render(processor, *request), requests)) == alone


# ---------------------------------------------------------------------------------------------
# loading


def test_folders_that_are_no_usable_model_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model cannot be read"):
        Processor(ModelConfig(str(tmp_path / "nothing")))
    write_model(tmp_path, VISION, TEMPLATE)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(ConfigError, match="CLIPImageProcessor"):
        Processor(ModelConfig(str(tmp_path)))
    path.unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        Processor(ModelConfig(str(tmp_path)))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Processor(ModelConfig(str(tmp_path)))


class OwnProcessor(Qwen2VLProcessor):
    """transformers' own, without the video processor that needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
        return type(argument)


def test_prompt_and_images_equal_the_results_of_transformers_processor() -> None:
    folder = Path(__file__).parents[3] / "ops" / "demo_model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    own = OwnProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
    )
    ours = Processor(ModelConfig(str(folder)))
    rng = random.Random(5)
    for num_images in (0, 1, 2, 3):
        pictures = [loaded((rng.randint(20, 700), rng.randint(20, 700))) for _ in range(num_images)]
        parts: list[ContentPart] = [TextPart("Look:"), *[image() for _ in pictures]]
        parts.append(TextPart("What is it?"))
        rendered = render(ours, [Message("user", parts)], pictures)
        kinds = [{"type": "text", "text": "Look:"}, *[{"type": "image"} for _ in pictures]]
        conversation = [
            {"role": "user", "content": [*kinds, {"type": "text", "text": "What is it?"}]}
        ]
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        expected = own(text=[text], images=[p.image for p in pictures] or None)
        assert rendered.prompt_token_ids == list(expected["input_ids"][0])
        if not pictures:
            continue
        tensors = [to_torch(tensor) for tensor in rendered.tensors]
        grids = [tensors[item.fields["image_grid_thw"]].tolist() for item in rendered.items]
        assert grids == expected["image_grid_thw"].tolist()
        for item in rendered.items:
            start, length = item.placeholder.offset, item.placeholder.length
            ids = rendered.prompt_token_ids
            assert set(ids[start : start + length]) == {own.image_token_id}
            assert own.image_token_id not in (ids[start - 1], ids[start + length])


def test_one_raster_at_a_time_is_held(processor: Processor) -> None:
    """Images are read in turn, and the one before the last is released."""
    held: list[int] = []
    most = 0

    def pictures() -> Iterator[DecodedImage]:
        nonlocal most
        for number in range(6):
            picture = Image.new("RGB", (200, 200))
            held.append(number)
            weakref.finalize(picture, held.remove, number)
            most = max(most, len(held))
            yield DecodedImage(picture, "RGB")
            del picture

    render(processor, [user(*[image() for _ in range(6)])], pictures())
    assert most <= 2
