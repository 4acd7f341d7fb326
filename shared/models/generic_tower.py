"""Towers and language adapters of generic families: transformers' modules."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

from shared.errors import ConfigError, UnsupportedContent
from shared.models.generic_image import IMAGE_GRID, REPLACEMENT, GenericImageLayout, sample_image
from shared.models.generic_sound import GenericSoundLayout, sample_sound
from shared.models.language import LanguageAdapter, MediaPrompt, PromptPositions
from shared.models.lazy_module import LazyModule
from shared.models.media import DecodedImage, SamplePlan
from shared.models.mel_layout import SAMPLE_RATE
from shared.models.tower_adapter import Fields, TowerAdapter, get_field, refuse
from shared.protocol.multimodal import AUDIO, IMAGE, Modality, PlaceholderRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

SIZES = "image_sizes"
"""Argument that transformers reads on the host."""
MAX_MERGE = 8
"""Largest number of patches that a tower merges to one embedding, in each direction."""


class GenericTower(TowerAdapter):
    """`get_image_features` of a model, for the fields of `GenericImageLayout`."""

    metadata: tuple[str, ...] = (REPLACEMENT, IMAGE_GRID)
    token = "image_token_id"
    """Name of the config's key with the token that an embedding replaces."""
    getter = "get_image_features"
    """Name of the method of transformers' model that returns the embeddings."""
    medium: Modality = IMAGE
    # transformers leaves the methods of this class without types.
    auto_class: Any = AutoModelForImageTextToText
    joins_items = True
    """Whether items with fields of the same shapes go through the model in one call."""

    @property
    def modules(self) -> tuple[str, ...]:
        return self._parts[0]

    @property
    def language_modules(self) -> tuple[str, ...]:
        return self._parts[1]

    def count(self, fields: Fields) -> int:
        replacement = get_field(fields, REPLACEMENT, torch.int64, (-1,))
        count = int((replacement == getattr(self._config, self.token)).sum())
        if IMAGE_GRID in fields:
            grid = get_field(fields, IMAGE_GRID, torch.int64, (1, 3))
            if int(grid.min()) < 1 or float(grid.double().prod()) > MAX_MERGE**2 * count:
                refuse(f"{IMAGE_GRID} is {grid.tolist()} for {count} tokens")
        return count

    def check(self, fields: Fields) -> None:
        for name, tensor in fields.items():
            if not bool(tensor.isfinite().all()):
                refuse(f"{name} holds values that are not finite")

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        inputs = [self._inputs_of(model, fields) for fields in batch]
        groups: dict[object, list[int]] = {}
        for index, fields in enumerate(batch):
            shapes = ((name, value.dtype, value.shape) for name, value in inputs[index].items())
            key = (self.count(fields), *shapes) if self.joins_items else index
            groups.setdefault(key, []).append(index)
        embeddings: dict[int, Tensor] = {}
        for group in groups.values():
            count = self.count(batch[group[0]])
            rows = self._encode_group(model, [inputs[index] for index in group], count)
            embeddings |= zip(group, rows, strict=True)
        return [embeddings[index] for index in range(len(batch))]

    def sample(self) -> Fields:
        # torch may be hidden when this module is imported.
        from shared.codec.tensors import to_torch

        layout = GenericImageLayout(Path(self._config.name_or_path), self._config)
        fields, _ = layout.process(DecodedImage(sample_image(), "sample"), "sample")
        return {name: to_torch(tensor) for name, tensor in fields.items()}

    def _encode_group(
        self, model: Any, group: Sequence[Mapping[str, Tensor]], count: int
    ) -> list[Tensor]:
        """Return the embeddings of items by their arguments; each has `count` of them."""
        inputs = {name: torch.cat([each[name] for each in group]) for name in group[0]}
        for name, tensor in inputs.items():
            if name != SIZES or not self.joins_items:
                tensor = tensor.to(model.device)
            inputs[name] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        try:
            features = self._getter_of(model)(**inputs, return_dict=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            refuse(f"the model cannot encode the {self.medium}: {error}")
        embeddings = _join_rows(features.pooler_output)
        if len(embeddings) != count * len(group):
            num_rows = len(embeddings) / len(group)
            refuse(f"the {self.medium} has {num_rows:g} embeddings for {count} tokens")
        return list(torch.split(embeddings, count))

    def _inputs_of(self, model: Any, fields: Fields) -> dict[str, Tensor]:
        """Return the arguments of the model's method; the first dimension is the item's."""
        # As in `generate`, which drops the other fields of a processor.
        names = inspect.signature(self._getter_of(model)).parameters.keys() & fields.keys()
        return {name: fields[name] for name in sorted(names)}

    def _getter_of(self, model: Any) -> Any:
        return getattr(model.base_model, self.getter)

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the modules for the medium, and of the others."""
        with torch.device("meta"):
            model = self.auto_class.from_config(self._config)
        decoder, prefix = model.get_decoder(), model.base_model_prefix
        towers: list[str] = []
        language = ["lm_head"]
        for name, child in model.base_model.named_children():
            is_language = any(module is decoder for module in child.modules())
            (language if is_language else towers).append(f"{prefix}.{name}")
        if len(language) == 1:
            raise ConfigError(
                f"models.path: transformers' model of type {self._config.model_type!r} has no"
                " separate decoder",
                field="models.path",
            )
        return tuple(towers), tuple(language)


class GenericSoundTower(GenericTower):
    """`get_audio_features` of a model, for the fields of `GenericSoundLayout`."""

    metadata = (REPLACEMENT,)
    token = "audio_token_id"
    getter = "get_audio_features"
    medium: Modality = AUDIO
    auto_class: Any = AutoModelForSeq2SeqLM

    def sample(self) -> Fields:
        from shared.codec.tensors import to_torch

        layout = GenericSoundLayout(Path(self._config.name_or_path), self._config)
        fields, _ = layout.pack(iter([sample_sound()]), SamplePlan(SAMPLE_RATE, 0), "sample")
        return {name: to_torch(tensor) for name, tensor in fields.items()}

    def _inputs_of(self, model: Any, fields: Fields) -> dict[str, Tensor]:
        # Music Flamingo computes the times of the embeddings from the tokens.
        return super()._inputs_of(model, {**fields, "input_ids": fields[REPLACEMENT][None]})


class UntestedTower(GenericTower):
    """The tower of a type for which no test has compared joined items with single ones."""

    joins_items = False


class UntestedSoundTower(GenericSoundTower):
    """The same for sounds."""

    joins_items = False


def _join_rows(features: Any) -> Tensor:
    """Return the embeddings, [num_embeds, hidden_size], from one tensor, or from one per image."""
    tiles = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([tile.reshape(-1, tile.shape[-1]) for tile in tiles])


class GenericLanguage(LanguageAdapter):
    """Decoder of a model with images; positions come from its `get_rope_index`, if it has one."""

    def __init__(
        self,
        model: PreTrainedModel,
        tower: TowerAdapter | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model, tower, placeholders)
        self._rope_index: Any = getattr(model.base_model, "get_rope_index", None)
        if self._rope_index is not None:
            token_ids = torch.zeros(1, 1, dtype=torch.int64)
            positions, _ = self._rope_index(input_ids=token_ids, mm_token_type_ids=token_ids)
            self.num_position_rows = len(positions)

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        if self._rope_index is None:
            return None
        items = sorted(prompt.items, key=lambda item: item.placeholder.offset)
        kinds = torch.zeros(1, len(prompt.prompt_token_ids), dtype=torch.int)
        for item in items:
            indexes = torch.tensor(item.placeholder.embed_indexes()) + item.placeholder.offset
            kinds[0, indexes] = 1
        try:
            positions, delta = self._rope_index(
                input_ids=torch.tensor([prompt.prompt_token_ids]),
                mm_token_type_ids=kinds,
                image_grid_thw=torch.cat([item.fields[IMAGE_GRID] for item in items]),
            )
        except (RuntimeError, ValueError, LookupError, StopIteration) as error:
            # The rule finds images by the text between them.
            refuse(f"the model has no positions for images without text between them: {error}")
        return PromptPositions(positions[:, 0], int(delta[0]))


class SpanLanguage(GenericLanguage):
    """The decoder of a model in which the tokens of an image attend to each other."""

    def spans_of(self, prompt: MediaPrompt) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for item in sorted(prompt.items, key=lambda item: item.placeholder.offset):
            runs = _embed_runs(item.placeholder)
            if spans and spans[-1][1] == runs[0][0]:
                # They would attend to each other, and the hash of a block covers one image.
                refuse("the model needs text between two images")
            spans += runs
        return spans


def _embed_runs(placeholder: PlaceholderRange) -> list[tuple[int, int]]:
    """Return the runs of consecutive tokens [start, stop) that embeddings replace."""
    runs = []
    numbered = enumerate(placeholder.embed_indexes(), placeholder.offset)
    for _, run in itertools.groupby(numbered, lambda pair: pair[1] - pair[0]):
        indexes = [placeholder.offset + index for _, index in run]
        runs.append((indexes[0], indexes[-1] + 1))
    return runs


class PrefixLanguage(GenericLanguage):
    """The decoder of PaliGemma: all tokens of a prompt attend to each other; positions begin at 1.

    Keys and values of a prompt depend on its later tokens, so prompts share no prefixes.
    """

    shares_prefixes = False
    exceeds_windows = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Attention that is not causal is refused, but here the mask comes from `spans_of`.
        module: Any
        for module in self.decoder.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = True

    def check(self, prompt: MediaPrompt) -> None:
        if not prompt.items:
            raise UnsupportedContent("this model needs an image in each prompt", field="items")
        super().check(prompt)

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        return PromptPositions(torch.arange(1, len(prompt.prompt_token_ids) + 1)[None], 1)

    def spans_of(self, prompt: MediaPrompt) -> list[tuple[int, int]]:
        return [(0, len(prompt.prompt_token_ids))]


class WindowSpanLanguage(SpanLanguage):
    """The decoder of Gemma 4: only layers with windows attend in both directions in a span.

    All layers of the smaller models are causal. Layers that use the ids of tokens get the padding
    token in the place of an image.
    """

    opens_full_layers = False

    def spans_of(self, prompt: MediaPrompt) -> list[tuple[int, int]]:
        config: Any = self.decoder.config
        return super().spans_of(prompt) if config.use_bidirectional_attention else []

    def layer_inputs(self, token_ids: Tensor | None) -> dict[str, Tensor]:
        if token_ids is not None:
            config: Any = self.model.config
            for medium in (config.image_token_id, config.video_token_id, config.audio_token_id):
                token_ids = token_ids.masked_fill(
                    token_ids == medium, config.text_config.pad_token_id
                )
        return super().layer_inputs(token_ids)
