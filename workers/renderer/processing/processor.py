"""Processor: converts messages and media to token ids and tensors, like the model's own processor.

The layouts of the model's family convert media to fields; see `shared.models`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from shared.codec import vllm_kwargs
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import VideoFacts
from shared.config.schema import ModelConfig
from shared.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedContent,
    first_sentence,
)
from shared.models.chat_templates import check_chat_templates
from shared.models.layout import PlannedLayout
from shared.models.media import DecodedMedia
from shared.models.reach import count_positions
from shared.models.registry import find_family
from shared.protocol.multimodal import (
    DEFAULT_SAMPLING,
    IMAGE,
    FrameSampling,
    Modality,
    MultiModalKwargsItem,
    PlaceholderRange,
    Placement,
    content_hash,
)
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import Message, Prompt
from shared.protocol.text_length import check_text_len
from workers.renderer.processing import prompt as prompts
from workers.renderer.processing.inputs import open_inputs
from workers.renderer.processing.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a prompt, its items, and the tensors that the items index."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    tensors: list[TensorData]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image, or another medium, in the form that the engine accepts."""

    mm_hash: str
    num_tokens: int
    """Number of embeddings."""
    fields: dict[str, TensorData]
    modality: Modality = IMAGE
    placement: Placement | None = None
    video: VideoFacts | None = None


@dataclass(frozen=True, slots=True)
class MeasuredMedia:
    """Number and placement of a medium's tokens, without its fields."""

    modality: Modality
    num_tokens: int
    placement: Placement | None


class Processor:
    """One model's tokenizer, chat template and media layouts. Thread-safe."""

    def __init__(self, model: ModelConfig) -> None:
        """Load a folder in Hugging Face format. Nothing is downloaded, and no code of it is run.

        Raises ConfigError.
        """
        folder = Path(model.path)
        try:
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Unusable files make transformers raise exceptions of any type.
            raise ConfigError(
                f"{folder}: the model cannot be read: {first_sentence(error)}", field="path"
            ) from error
        check_chat_templates(folder)
        family = find_family(config)
        tokenizer.chat_template = tokenizer.chat_template or _legacy_chat_template(folder)
        own_template = None
        if not tokenizer.chat_template and family is not None and family.chat_template is not None:
            tokenizer.chat_template = own_template = family.chat_template(folder)
        if not tokenizer.chat_template:
            raise ConfigError(f"{folder}: the tokenizer has no chat template", field="path")
        self._inputs = open_inputs(family, folder, config, model)
        self.placeholder_ids = {name: media.placeholder_id for name, media in self._inputs.items()}
        around = {media.placeholder_id: media.layout.around for media in self._inputs.values()}
        self.tokenizer = PromptTokenizer(
            tokenizer,
            self.placeholder_ids,
            around,
            is_complete=own_template is not None,
        )
        self.needs_sound = family is not None and family.language.attends_items
        """Whether each prompt must have a sound."""
        default = None if family is None else family.tool_format
        self._tool_parser = model.tool_parser or self.tokenizer.find_tool_format(default)
        longest = count_positions(config.get_text_config())
        self.max_model_len = min(longest, model.max_model_len or longest)
        """Limit on prompt and answer together, in tokens."""
        self.vocab_size: int = config.get_text_config().vocab_size
        self._hidden_size: int = config.get_text_config().hidden_size

    def accepts(self, modality: Modality) -> bool:
        return modality in self._inputs and self._inputs[modality].limit > 0

    def window_s(self, modality: Modality) -> float:
        """Return the number of seconds of a medium that the model processes at once."""
        layout = self._inputs[modality].layout
        return layout.window_s if isinstance(layout, PlannedLayout) else math.inf

    def card(self, name: str) -> ModelCard:
        """Return a description of the model for clients; `name` is the model's name here."""
        return ModelCard(
            model=name,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            takes_images=self.accepts(IMAGE),
            takes_tools=self.tokenizer.takes_tools,
            tool_parser=self._tool_parser,
            call_signs=self.tokenizer.signs() if self._tool_parser == "hermes" else None,
            hidden_size=self._hidden_size,
            media=[modality for modality in self._inputs if self.accepts(modality)],
        )

    # -- media ------------------------------------------------------------------------------------

    def check(self, messages: Sequence[Message]) -> None:
        """Check the media, before any is loaded. Raises UnsupportedContent or MediaTooLarge."""
        parts = list(prompts.media_parts(messages))
        self._check_counts((part.modality, part.field) for part in parts)
        for part in parts:
            if part.sampling.use_audio and not self._inputs[part.modality].hears_videos:
                raise UnsupportedContent(
                    "this model does not use the sound of videos (use_audio_in_video)",
                    field=f"{part.field.removesuffix('url')}use_audio",
                )

    def metadata(
        self, modality: Modality, fields: Mapping[str, TensorData]
    ) -> dict[str, TensorData]:
        """Return the fields of an item that the language model needs besides embeddings."""
        names = self._inputs[modality].layout.metadata
        return {name: fields[name] for name in names if name in fields}

    def hash_media(
        self,
        modality: Modality,
        source_hash: str,
        tenant: str,
        sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> str:
        """Return the mm_hash of the result of `process` for the file with this hash.

        It differs between tenants, and so do the cache keys that are derived from it.
        """
        return self._inputs[modality].hash(source_hash, tenant, sampling)

    def process(
        self,
        media: DecodedMedia,
        field: str,
        tenant: str,
        sampling: FrameSampling = DEFAULT_SAMPLING,
        max_tokens: int | None = None,
    ) -> ProcessedImage:
        """Return a medium in the form that the engine accepts.

        Raises InvalidMedia for media that the model does not accept, and ContextTooLong for a video
        or a sound of more than `max_tokens`, before it is decoded.
        """
        source = self._inputs[media.modality]
        limit = self.max_model_len if max_tokens is None else max_tokens
        fields, num_tokens, video = source.process(media, sampling, limit, field)
        mm_hash = source.hash(media.source_hash, tenant, sampling)
        placement = self.place(media.modality, fields)
        return ProcessedImage(mm_hash, num_tokens, fields, media.modality, placement, video)

    def measure(
        self, media: DecodedMedia, field: str, sampling: FrameSampling = DEFAULT_SAMPLING
    ) -> MeasuredMedia:
        """Return the tokens of a medium without its fields. Raises the errors of `process`."""
        source = self._inputs[media.modality]
        metadata, num_tokens = source.outline(media, sampling, self.max_model_len, field)
        placement = self.place(media.modality, metadata)
        return MeasuredMedia(media.modality, num_tokens, placement)

    def place(self, modality: Modality, metadata: Mapping[str, TensorData]) -> Placement | None:
        """Return the tokens of an item with these metadata; None for a run of placeholders."""
        layout = self._inputs[modality].layout
        return layout.place(metadata, lambda text: self.tokenizer.encode(text, False))

    def hash_item(self, modality: Modality, source_hash: str, tenant: str) -> str:
        """Return the mm_hash of the result of `decode_item` for the bytes with this hash."""
        return content_hash("item", tenant, source_hash, self._inputs[modality].layout.fingerprint)

    def decode_item(
        self, modality: Modality, data: bytes, mm_hash: str, field: str
    ) -> ProcessedImage:
        """Decode an item that another server has processed. Raises InvalidRequest."""
        wire = vllm_kwargs.decode_item(data, field)
        fields, num_tokens = self._inputs[modality].layout.from_wire(wire, field)
        placement = self.place(modality, fields)
        return ProcessedImage(mm_hash, num_tokens, fields, modality, placement)

    def encode_item(self, image: ProcessedImage) -> tuple[bytes, bytes | None]:
        """Return the bytes of an item for another server, and the bytes of its metadata, if any."""
        wire = self._inputs[image.modality].layout.to_wire(image.fields)
        metadata = vllm_kwargs.metadata_of(wire)
        encoded = vllm_kwargs.encode_item(metadata) if metadata else None
        return vllm_kwargs.encode_item(wire), encoded

    def check_features(self, prompt: Prompt, embeds: bool = False) -> list[PlaceholderRange]:
        """Return the placeholder ranges of items that other servers have processed.

        Raises a RequestError: UnsupportedContent, MediaTooLarge, ContextTooLong, or InvalidRequest
        for ranges that do not hold placeholders.
        """
        token_ids = prompt.token_ids or []
        self.check_len(token_ids, "prompt_token_ids", embeds)
        self._check_counts((feature.modality, "features") for feature in prompt.features)
        embed_ids = {name: media.layout.embed_ids for name, media in self._inputs.items()}
        return prompts.check_ranges(token_ids, prompt.features, self.placeholder_ids, embed_ids)

    def _check_counts(self, media: Iterable[tuple[Modality, str]]) -> None:
        fields: dict[Modality, list[str]] = {}
        for modality, field in media:
            fields.setdefault(modality, []).append(field)
        for modality, named in fields.items():
            if modality not in self._inputs:
                raise UnsupportedContent(f"this model takes no {modality}s", field=named[0])
            limit = self._inputs[modality].limit
            if len(named) > limit:
                raise MediaTooLarge(
                    f"{modality}s in the request: {len(named)}, over the limit of {limit}"
                    f" (max_{modality}s)",
                    field=named[limit],
                )

    # -- prompts ----------------------------------------------------------------------------------

    def expand(
        self,
        token_ids: list[int],
        media: Sequence[prompts.SizedMedia],
        field: str = "messages",
        embeds: bool = False,
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """Return the prompt with room for these media, and their placeholder ranges.

        Raises InvalidRequest when the prompt has other placeholders, or ContextTooLong.
        """
        token_ids, ranges = self.expand_unchecked(token_ids, media, field)
        self.check_len(token_ids, field, embeds)
        return token_ids, ranges

    def expand_unchecked(
        self, token_ids: list[int], media: Sequence[prompts.SizedMedia], field: str = "messages"
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """Do the same as `expand`, without a limit on the prompt's length."""
        return prompts.expand(token_ids, media, self.placeholder_ids, field)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with one placeholder for each medium in messages.

        Raises a RequestError: the errors of `check`, InvalidRequest for messages that the template
        refuses, for control tokens in messages and for ids outside the vocabulary,
        UnsupportedContent, ContextTooLong.
        """
        if prompt.token_ids is not None:
            self._check_ids(prompt.token_ids, "prompt_token_ids")
            return prompt.token_ids
        if prompt.text is not None:
            check_text_len(prompt, self.max_model_len)
            return self.tokenizer.encode(prompt.text, prompt.add_special_tokens is not False)
        self.check(prompt.messages)
        check_text_len(prompt, self.max_model_len)
        return self.tokenizer.tokenize(prompt)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool
    ) -> tuple[str, list[bytes]]:
        """Return the text of all tokens, and the bytes of each. Raises InvalidRequest."""
        self._check_ids(token_ids, "tokens")
        text = self.tokenizer.decode(token_ids, skip_special_tokens)
        return text, self.tokenizer.bytes_of(token_ids)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's spelling of each token."""
        return self.tokenizer.spellings(token_ids)

    def check_len(self, token_ids: Sequence[int], field: str, embeds: bool = False) -> None:
        """Check that prompt and answer fit into the context. No answer follows if it `embeds`.

        Raises ContextTooLong.
        """
        if len(token_ids) + (not embeds) > self.max_model_len:
            excess = "are more than" if embeds else "leave no room for an answer in"
            raise ContextTooLong(
                f"the prompt's {len(token_ids)} tokens {excess} the model's {self.max_model_len}",
                field=field,
            )

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            i = next(i for i, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"token id {token_ids[i]} is out of the vocabulary of {self.vocab_size}",
                field=f"{field}[{i}]",
            )


def join(
    token_ids: list[int], ranges: Sequence[PlaceholderRange], media: Sequence[ProcessedImage]
) -> Rendered:
    """Return a prompt with its items and all their tensors."""
    tensors: list[TensorData] = []
    items = []
    for medium, placeholder in zip(media, ranges, strict=True):
        indexes = {name: len(tensors) + i for i, name in enumerate(medium.fields)}
        items.append(MultiModalKwargsItem(medium.modality, medium.mm_hash, placeholder, indexes))
        tensors += medium.fields.values()
    return Rendered(token_ids, items, tensors)


def _legacy_chat_template(folder: Path) -> str | None:
    """Return the chat template from the separate file of older folders, if there is one."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template: str = json.loads(file.read_text())["chat_template"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{file}: the chat template cannot be read: {error}", field="path"
        ) from error
    return template
