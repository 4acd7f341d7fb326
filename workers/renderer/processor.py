"""Messages and pictures in, token ids and tensors out: what a model's own processor would feed it.

All knowledge of one model family is in `_Pictures`: Qwen2-VL's patches and grid. Another family
gets a class of its own beside it.

Pixels stay small on the way to the engine: 8 bits each, and one temporal frame, because the
processor repeats a still picture's frame anyway. What is left of its work is a table of 256 values
per channel, computed by the processor's own functions, so the engine restores its output bit for
bit: `pixel_table[channel, pixel_patches]`, repeated `temporal_patch_size` times.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec import TensorData
from shared.config import ModelConfig
from shared.errors import (
    ConfigError,
    ContextTooLong,
    InvalidMedia,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
)
from shared.messages import Message
from shared.multimodal import MultiModalKwargsItem, PlaceholderRange, content_hash
from shared.tensors import from_numpy
from workers.renderer import prompt
from workers.renderer.images import LoadedImage

# transformers leaves this one without types.
_load_image_processor: Any = AutoImageProcessor.from_pretrained

# English text has 4 to 5 bytes a token, other scripts fewer. What has more than 16 is long runs of
# blanks, and tokenizing 50 MB to say so would be an attack's whole point.
MAX_BYTES_PER_TOKEN = 16
# Of Qwen2-VL's processor, which raises ValueError beyond it.
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class Rendered:
    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    tensors: list[TensorData]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as the engine takes it."""

    mm_hash: str
    num_tokens: int
    fields: dict[str, TensorData]


class Processor:
    """One model's tokenizer, chat template and, if it sees, picture processor; thread-safe."""

    def __init__(self, model: ModelConfig) -> None:
        """Load a folder in Hugging Face format; no code from it is run, nothing is downloaded.

        Raises ConfigError.
        """
        folder = Path(model.path)
        try:
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no model can be read: {error}", field="path") from error
        if not tokenizer.chat_template:
            raise ConfigError(f"{folder}: the tokenizer has no chat template", field="path")
        self._tokenizer = tokenizer
        self._image_token_id: int | None = getattr(config, "image_token_id", None)
        self._pictures = None if self._image_token_id is None else _Pictures(folder)
        self._max_images = model.max_images
        longest: int = config.get_text_config().max_position_embeddings
        self.max_model_len = min(longest, model.max_model_len or longest)
        """In tokens, prompt and answer together."""
        self._control_ids = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or token_id == self._image_token_id
        }
        # transformers' call sets truncation and padding on the shared Rust object at every call;
        # the object itself may be used by many threads as long as nobody does.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()

    @property
    def takes_pictures(self) -> bool:
        return self._pictures is not None and self._max_images > 0

    def check(self, messages: Sequence[Message]) -> None:
        """What can be refused before a picture is loaded or a token is made.

        Raises UnsupportedContent, MediaTooLarge or ContextTooLong.
        """
        fields = [field for field, _ in prompt.image_parts(messages)]
        if fields and self._pictures is None:
            raise UnsupportedContent("this model takes no pictures", field=fields[0])
        if len(fields) > self._max_images:
            raise MediaTooLarge(
                f"{len(fields)} pictures are over the limit of {self._max_images} a request",
                field=fields[self._max_images],
            )
        self._check_bytes((text for m in messages for text in prompt.texts(m)), "messages")

    def render(self, messages: Sequence[Message], images: Iterable[LoadedImage]) -> Rendered:
        """`images` are those of `prompt.image_parts`, in that order; each is taken when its turn
        comes, after `check` and after the text, and let go before the next but one.

        Raises a RequestError: besides those of `check`, InvalidRequest for text with control
        tokens or messages that the template refuses, InvalidMedia, ContextTooLong.
        """
        token_ids = self.tokenize(messages)
        fields = [field for field, _ in prompt.image_parts(messages)]
        processed = [self.process(i, field) for i, field in zip(images, fields, strict=True)]
        counts = [picture.num_tokens for picture in processed]
        token_ids, ranges = self.expand(token_ids, counts)
        return join(token_ids, ranges, processed)

    def hash_picture(self, source_hash: str) -> str:
        """The mm_hash of what `process` makes of the picture in this file."""
        assert self._pictures is not None
        return content_hash(source_hash, self._pictures.fingerprint)

    def process(self, image: LoadedImage, field: str) -> Picture:
        """Raises InvalidMedia for a picture that the model cannot take."""
        assert self._pictures is not None
        fields, num_tokens = self._pictures.process(image.image, field)
        return Picture(self.hash_picture(image.source_hash), num_tokens, fields)

    def expand(
        self, token_ids: list[int], counts: Sequence[int]
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """The prompt with room for pictures of so many tokens, and where that is.

        Raises ContextTooLong.
        """
        token_ids, ranges = self.make_room(token_ids, counts)
        self._check_len(token_ids)
        return token_ids, ranges

    def make_room(
        self, token_ids: list[int], counts: Sequence[int]
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """Like `expand`, however long the prompt becomes."""
        if self._image_token_id is None:
            return token_ids, []
        return prompt.expand(token_ids, self._image_token_id, counts)

    def tokenize_text(self, text: str, field: str) -> list[int]:
        """Token ids of a text as it is: no template, and control tokens where it spells them.

        Raises ContextTooLong for one that is longer than any prompt can be.
        """
        self._check_bytes([text], field)
        return self._encode_text(text)

    def tokenize(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the templated messages, one for each picture.

        Raises a RequestError: those of `check`, and InvalidRequest for text with control tokens or
        messages that the template refuses.
        """
        self.check(messages)
        return self._tokenize(messages)

    def _tokenize(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the templated messages, in which no text of a user made a control token.

        A user who types `<|image_pad|>` or `<|im_start|>system` would bind pictures to other
        places or speak in another role. Such text is refused rather than encoded as plain
        characters: that would need the text to be tokenized apart from the template's, and so
        differently from how the model saw it in training. The test is on tokens, not on strings,
        because only the tokenizer knows what its normaliser turns into a control token, and only
        the template what it joins: with every text replaced by a letter, the control tokens must
        be the same.
        """
        token_ids = self._encode(messages)
        control = [token_id for token_id in token_ids if token_id in self._control_ids]
        harmless = self._encode(messages, neutral=True)
        if control != [token_id for token_id in harmless if token_id in self._control_ids]:
            raise self._control_token_error(messages)
        return token_ids

    def _control_token_error(self, messages: Sequence[Message]) -> InvalidRequest:
        for i, message in enumerate(messages):
            for token_id in self._encode_text("".join(prompt.texts(message))):
                if token_id in self._control_ids:
                    token = self._tokenizer.convert_ids_to_tokens(token_id)
                    return InvalidRequest(
                        f"the text contains the model's control token {token}",
                        field=f"messages[{i}].content",
                    )
        return InvalidRequest("the texts join into a control token", field="messages")

    def _encode(self, messages: Sequence[Message], *, neutral: bool = False) -> list[int]:
        conversation = prompt.template_messages(
            messages, parts=self._pictures is not None, text=_neutral if neutral else str
        )
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:  # such as roles that do not alternate
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", field="messages"
            ) from error
        return self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _check_bytes(self, texts: Iterable[str], field: str) -> None:
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > MAX_BYTES_PER_TOKEN * self.max_model_len:
            raise ContextTooLong(
                f"{num_bytes} bytes of text are over the limit of {MAX_BYTES_PER_TOKEN} bytes for"
                f" each of the model's {self.max_model_len} tokens",
                field=field,
            )

    def _check_len(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt's {len(token_ids)} tokens leave no room for an answer in the model's"
                f" {self.max_model_len}",
                field="messages",
            )


def join(
    token_ids: list[int], ranges: Sequence[PlaceholderRange], pictures: Sequence[Picture]
) -> Rendered:
    """A prompt with its pictures in their places, and all their tensors."""
    tensors: list[TensorData] = []
    items = []
    for picture, placeholder in zip(pictures, ranges, strict=True):
        indexes = {name: len(tensors) + i for i, name in enumerate(picture.fields)}
        items.append(MultiModalKwargsItem("image", picture.mm_hash, placeholder, indexes))
        tensors += picture.fields.values()
    return Rendered(token_ids, items, tensors)


def _neutral(text: str) -> str:
    """A stand-in without control tokens, empty or blank where `text` is, for templates look."""
    return "x" if text.strip() else text


class _Pictures:
    """Qwen2-VL's picture processor, and the only place that knows its layout."""

    def __init__(self, folder: Path) -> None:
        try:
            loaded = _load_image_processor(folder, local_files_only=True, backend="pil")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no picture processor: {error}", field="path") from error
        if not isinstance(loaded, Qwen2VLImageProcessorPil):
            raise ConfigError(
                f"{folder}: pictures are only known as Qwen2-VL takes them, not for"
                f" {type(loaded).__name__}",
                field="path",
            )
        # Untyped from here on; what comes out is checked by shape.
        self._processor: Any = loaded
        self._table = from_numpy(_value_table(loaded))
        settings = json.dumps(loaded.to_dict(), sort_keys=True, default=str)
        self.fingerprint = content_hash(type(loaded).__qualname__, settings)

    def process(self, image: Image.Image, field: str) -> tuple[dict[str, TensorData], int]:
        """Fields of one still picture, and how many tokens it fills:

        pixel_patches  uint8 [num_patches, channels, patch_h * patch_w], one temporal frame
        pixel_table    float32 [channels, 256], the normalised value of every pixel value
        image_grid_thw int64 [3], in patches: 1, rows, columns

        Raises InvalidMedia for a picture too narrow for the model.
        """
        width, height = image.size
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise InvalidMedia(
                f"a picture of {width} x {height} is more than {MAX_ASPECT_RATIO} times as long as"
                " wide",
                field=field,
            )
        output = self._processor(
            images=[image], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        grid = output["image_grid_thw"][0]
        fields = {
            "pixel_patches": from_numpy(self._first_frame(output["pixel_values"])),
            "pixel_table": self._table,
            "image_grid_thw": from_numpy(grid),
        }
        num_tokens = int(grid.prod()) // self._processor.merge_size**2
        return fields, num_tokens

    def _first_frame(self, pixel_values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """float [num_patches, channels * frames * patch_h * patch_w] of whole numbers, as uint8.

        The frames of a still picture are equal.
        """
        frames, patch_len = self._processor.temporal_patch_size, self._processor.patch_size**2
        rows = pixel_values.reshape(len(pixel_values), -1, frames, patch_len)
        return rows[:, :, 0].astype(np.uint8)


def _value_table(processor: Any) -> np.ndarray[Any, Any]:
    """float32 [channels, 256]: the processor's own arithmetic on every value that a pixel has.

    Recomputing it by formula was equal on 443 of 768 values only; the order of operations matters.
    """
    values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # [channels, 1, 256]
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return values[:, 0].astype(np.float32)
