"""Messages and pictures in, token ids and tensors out: what a model's own processor would feed it.

What is particular to a model family, the layout of its pictures, is in `layouts`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoConfig, AutoTokenizer

from shared.codec import TensorData
from shared.config import ModelConfig
from shared.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
)
from shared.messages import Message
from shared.multimodal import MultiModalKwargsItem, PlaceholderRange, content_hash
from workers.renderer import prompt
from workers.renderer.images import LoadedImage
from workers.renderer.layouts import Layout, layout_of

# English text has 4 to 5 bytes a token, other scripts fewer. What has more than 16 is long runs of
# blanks, and tokenizing 50 MB to say so would be an attack's whole point.
MAX_BYTES_PER_TOKEN = 16


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
        tokenizer.chat_template = tokenizer.chat_template or _legacy_chat_template(folder)
        if not tokenizer.chat_template:
            raise ConfigError(f"{folder}: the tokenizer has no chat template", field="path")
        self._tokenizer = tokenizer
        self._image_token_id: int | None = getattr(config, "image_token_id", None)
        self._layout: Layout | None = None
        if self._image_token_id is not None:
            self._layout = layout_of(folder, config)
        self._takes_strings = self._layout is None or _writes_strings(tokenizer)
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
        return self._layout is not None and self._max_images > 0

    def check(self, messages: Sequence[Message]) -> None:
        """What can be refused before a picture is loaded or a token is made.

        Raises UnsupportedContent, MediaTooLarge or ContextTooLong.
        """
        fields = [field for field, _ in prompt.image_parts(messages)]
        if fields and self._layout is None:
            raise UnsupportedContent("this model takes no pictures", field=fields[0])
        if len(fields) > self._max_images:
            raise MediaTooLarge(
                f"{len(fields)} pictures are over the limit of {self._max_images} a request",
                field=fields[self._max_images],
            )
        self._check_bytes((text for m in messages for text in prompt.texts(m)), "messages")

    def render(
        self, messages: Sequence[Message], images: Iterable[LoadedImage], tenant: str = ""
    ) -> Rendered:
        """`images` are those of `prompt.image_parts`, in that order; each is taken when its turn
        comes, after `check` and after the text, and let go before the next but one.

        Raises a RequestError: besides those of `check`, InvalidRequest for text with control
        tokens or messages that the template refuses, InvalidMedia, ContextTooLong.
        """
        token_ids = self.tokenize(messages)
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

    def process(self, image: LoadedImage, field: str, tenant: str) -> Picture:
        """Raises InvalidMedia for a picture that the model cannot take."""
        assert self._layout is not None
        fields, num_tokens = self._layout.process(image.image, field)
        return Picture(self.hash_picture(image.source_hash, tenant), num_tokens, fields)

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
        return self._encode(text)

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
        neutral = self._apply_template(messages, _neutral)
        special = self._adds_special_tokens(neutral)
        token_ids = self._encode(self._apply_template(messages, str), special)
        control = [token_id for token_id in token_ids if token_id in self._control_ids]
        harmless = self._encode(neutral, special)
        if control != [token_id for token_id in harmless if token_id in self._control_ids]:
            raise self._control_token_error(messages)
        return token_ids

    def _adds_special_tokens(self, text: str) -> bool:
        """Whether the tokenizer sets a BOS before what the template made, or whatever it adds.

        As transformers has it: never where a tokenizer applies its template, but where a model's
        processor does, unless the template has written one. LLaVA's does not.
        """
        bos: str | None = self._tokenizer.bos_token
        return self._layout is not None and not (bos and text.startswith(bos))

    def _control_token_error(self, messages: Sequence[Message]) -> InvalidRequest:
        for i, message in enumerate(messages):
            for token_id in self._encode("".join(prompt.texts(message))):
                if token_id in self._control_ids:
                    token = self._tokenizer.convert_ids_to_tokens(token_id)
                    return InvalidRequest(
                        f"the text contains the model's control token {token}",
                        field=f"messages[{i}].content",
                    )
        return InvalidRequest("the texts join into a control token", field="messages")

    def _apply_template(self, messages: Sequence[Message], text: Callable[[str], str]) -> str:
        """`text` is applied to every text."""
        conversation = prompt.template_messages(
            messages, parts=self._layout is not None, strings=self._takes_strings, text=text
        )
        try:
            templated: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:  # such as roles that do not alternate
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", field="messages"
            ) from error
        return templated

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
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


def _writes_strings(tokenizer: Any) -> bool:
    """Whether the chat template writes a text that is in no list of parts; LLaVA's drops it."""
    prompts = set()
    for text in ("a", "b"):
        try:
            prompts.add(
                tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
            )
        except jinja2.TemplateError:
            return False
    return len(prompts) == 2


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
