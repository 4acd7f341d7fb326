"""Messages and pictures in, token ids and tensors out: what a model's own processor would feed it.

What is particular to a model family, the layout of its pictures, is in `layouts`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from shared.codec import vllm_kwargs
from shared.codec.envelope import TensorData
from shared.config import ModelConfig
from shared.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
)
from shared.models.family import ModelFamily
from shared.models.layout import MediaLayout
from shared.models.media import DecodedImage
from shared.models.registry import find_family
from shared.protocol.messages import Message, Prompt
from shared.protocol.multimodal import (
    IMAGE,
    Modality,
    MultiModalKwargsItem,
    PlaceholderRange,
    content_hash,
)
from shared.protocol.renderer_rpc import ModelCard
from workers.renderer.processing import prompt
from workers.renderer.processing.tokenizer import PromptTokenizer

# English text has 4 to 5 bytes a token, other scripts fewer. What has more than 16 is long runs of
# blanks, and tokenizing 50 MB to say so would be an attack's whole point.
MAX_BYTES_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Rendered:
    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    tensors: list[TensorData]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the engine takes it."""

    mm_hash: str
    num_tokens: int
    fields: dict[str, TensorData]
    modality: Modality = IMAGE


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
        tokenizer.chat_template = tokenizer.chat_template or _legacy_chat_template(folder)
        if not tokenizer.chat_template:
            raise ConfigError(f"{folder}: the tokenizer has no chat template", field="path")
        self._tokenizer = tokenizer
        self._image_token_id: int | None = getattr(config, "image_token_id", None)
        self._layout: MediaLayout | None = None
        family = find_family(config)
        if self._image_token_id is not None:
            self._layout = _open_layout(family, folder, config)
        self._texts = PromptTokenizer(tokenizer, self._image_token_id, self._layout is not None)
        self._tool_parser = model.tool_parser or self._texts.tool_parser(family)
        self._max_images = model.max_images
        longest: int = config.get_text_config().max_position_embeddings
        self.max_model_len = min(longest, model.max_model_len or longest)
        """In tokens, prompt and answer together."""
        self.vocab_size: int = config.get_text_config().vocab_size

    @property
    def takes_pictures(self) -> bool:
        return self._layout is not None and self._max_images > 0

    def card(self, name: str) -> ModelCard:
        """What can be asked of the model, which is called `name` here."""
        return ModelCard(
            model=name,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            takes_pictures=self.takes_pictures,
            takes_tools=self._texts.takes_tools,
            tool_parser=self._tool_parser,
            call_signs=self._texts.signs() if self._tool_parser == "hermes" else None,
        )

    def check(self, messages: Sequence[Message]) -> None:
        """Whether the model takes so many pictures, before one is loaded.

        Raises UnsupportedContent or MediaTooLarge.
        """
        fields = [field for field, _ in prompt.image_parts(messages)]
        if fields and self._layout is None:
            raise UnsupportedContent("this model takes no pictures", field=fields[0])
        if len(fields) > self._max_images:
            raise MediaTooLarge(
                f"{len(fields)} pictures are over the limit of {self._max_images} a request",
                field=fields[self._max_images],
            )

    def render(
        self, messages: Sequence[Message], images: Iterable[DecodedImage], tenant: str = ""
    ) -> Rendered:
        """`images` are those of `prompt.image_parts`, in that order; each is taken when its turn
        comes, after `check` and after the text, and let go before the next but one.

        Raises a RequestError: besides those of `check`, InvalidRequest for text with control
        tokens or messages that the template refuses, InvalidMedia, ContextTooLong.
        """
        token_ids = self.tokenize(Prompt(list(messages)))
        fields = [field for field, _ in prompt.image_parts(messages)]
        processed = [
            self.process(image, field, tenant) for image, field in zip(images, fields, strict=True)
        ]
        counts = [picture.num_tokens for picture in processed]
        token_ids, ranges = self.expand(token_ids, counts)
        return join(token_ids, ranges, processed)

    @property
    def metadata(self) -> tuple[str, ...]:
        """Fields of a picture that the language model needs, whoever encodes the picture."""
        return () if self._layout is None else self._layout.metadata

    def hash_picture(self, source_hash: str, tenant: str) -> str:
        """The mm_hash of what `process` makes of the picture in this file.

        It differs between tenants, and so does the key of whatever is kept by it.
        """
        assert self._layout is not None
        return content_hash(tenant, source_hash, self._layout.fingerprint)

    def process(self, image: DecodedImage, field: str, tenant: str) -> ProcessedImage:
        """Raises InvalidMedia for a picture that the model cannot take."""
        assert self._layout is not None
        fields, num_tokens = self._layout.process(image, field)
        return ProcessedImage(self.hash_picture(image.source_hash, tenant), num_tokens, fields)

    def check_features(self, asked: Prompt) -> list[PlaceholderRange]:
        """Where the prompt has room for pictures that others have processed.

        Raises a RequestError: UnsupportedContent, MediaTooLarge, ContextTooLong, or InvalidRequest
        for places that are none.
        """
        token_ids, features = asked.token_ids or [], asked.features
        self.check_len(token_ids, "prompt_token_ids")
        if features and self._layout is None:
            raise UnsupportedContent("this model takes no pictures", field="features")
        if len(features) > self._max_images:
            raise MediaTooLarge(
                f"{len(features)} pictures are over the limit of {self._max_images} a request",
                field="features",
            )
        if self._image_token_id is None:
            return []
        ranges = [PlaceholderRange(feature.offset, feature.length) for feature in features]
        prompt.check_ranges(token_ids, self._image_token_id, ranges)
        return ranges

    def take_item(self, data: bytes, mm_hash: str, field: str) -> ProcessedImage:
        """The picture in the bytes of an item. Raises InvalidRequest naming `field`."""
        assert self._layout is not None
        fields, num_tokens = self._layout.from_wire(vllm_kwargs.decode_item(data, field), field)
        return ProcessedImage(mm_hash, num_tokens, fields)

    def give_item(self, picture: ProcessedImage) -> tuple[bytes, bytes]:
        """The bytes of an item, and of its metadata."""
        assert self._layout is not None
        wire = self._layout.to_wire(picture.fields)
        return vllm_kwargs.encode_item(wire), vllm_kwargs.encode_item(vllm_kwargs.metadata_of(wire))

    def hash_item(self, source_hash: str, tenant: str) -> str:
        """The mm_hash of what `take_item` makes of these bytes, like `hash_picture`."""
        assert self._layout is not None
        return content_hash("item", tenant, source_hash, self._layout.fingerprint)

    def expand(
        self, token_ids: list[int], counts: Sequence[int], field: str = "messages"
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """The prompt with room for pictures of so many tokens, and where that is.

        Raises InvalidRequest for more or fewer places than pictures, or ContextTooLong.
        """
        token_ids, ranges = self.make_room(token_ids, counts, field)
        self.check_len(token_ids, field)
        return token_ids, ranges

    def make_room(
        self, token_ids: list[int], counts: Sequence[int], field: str = "messages"
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """Like `expand`, however long the prompt becomes."""
        if self._image_token_id is None:
            return token_ids, []
        return prompt.expand(token_ids, self._image_token_id, counts, field)

    def tokenize(self, asked: Prompt) -> list[int]:
        """Token ids of a prompt in any form; of templated messages, one for each picture.

        Raises a RequestError: those of `check`, InvalidRequest for what the template refuses, for
        control tokens in messages or for ids that are none, UnsupportedContent, ContextTooLong.
        """
        if asked.token_ids is not None:
            self._check_ids(asked.token_ids, "prompt_token_ids")
            return asked.token_ids
        if asked.text is not None:
            self._check_bytes([asked.text], "prompt")
            return self._texts.encode(asked.text, asked.add_special_tokens is not False)
        self.check(asked.messages)
        self._check_bytes(prompt.written(asked), "messages")
        return self._texts.tokenize(asked)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool
    ) -> tuple[str, list[bytes]]:
        """The text of all tokens, and the bytes of each. Raises InvalidRequest."""
        self._check_ids(token_ids, "tokens")
        text = self._texts.decode(token_ids, skip_special_tokens)
        return text, self._texts.bytes_of(token_ids)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer itself spells it."""
        return self._texts.spellings(token_ids)

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            i = next(i for i, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"token id {token_ids[i]} is out of the vocabulary of {self.vocab_size}",
                field=f"{field}[{i}]",
            )

    def _check_bytes(self, texts: Iterable[str], field: str) -> None:
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > MAX_BYTES_PER_TOKEN * self.max_model_len:
            raise ContextTooLong(
                f"{num_bytes} bytes of text are over the limit of {MAX_BYTES_PER_TOKEN} bytes for"
                f" each of the model's {self.max_model_len} tokens",
                field=field,
            )

    def check_len(self, token_ids: Sequence[int], field: str) -> None:
        """Raises ContextTooLong."""
        if len(token_ids) >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt's {len(token_ids)} tokens leave no room for an answer in the model's"
                f" {self.max_model_len}",
                field=field,
            )


def join(
    token_ids: list[int], ranges: Sequence[PlaceholderRange], pictures: Sequence[ProcessedImage]
) -> Rendered:
    """A prompt with its pictures in their places, and all their tensors."""
    tensors: list[TensorData] = []
    items = []
    for picture, placeholder in zip(pictures, ranges, strict=True):
        indexes = {name: len(tensors) + i for i, name in enumerate(picture.fields)}
        items.append(MultiModalKwargsItem(picture.modality, picture.mm_hash, placeholder, indexes))
        tensors += picture.fields.values()
    return Rendered(token_ids, items, tensors)


def _open_layout(family: ModelFamily | None, folder: Path, config: Any) -> MediaLayout:
    if family is None or IMAGE not in family.media:
        raise ConfigError(
            f"{folder}: images are not supported in models of type {config.model_type!r}",
            field="path",
        )
    return family.media[IMAGE].open_layout(folder, config)


def _legacy_chat_template(folder: Path) -> str | None:
    """Where older folders have the template of their model's processor."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template: str = json.loads(file.read_text())["chat_template"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: no chat template can be read: {error}", field="path") from error
    return template
