"""What differs between model families: items to embeddings, prompts to positions.

A family wraps a transformers model as it is. It knows neither the KV cache nor batches; towers
keep transformers' own attention.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shared.errors import InvalidRequest, UnsupportedContent
from workers.engine.sequence import EngineRequest, Item


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Rotary positions of a prompt; token t behind it stands at t + delta in every row."""

    prompt: Tensor  # [num_position_rows, num_prompt_tokens] int64
    delta: int


class Family:
    """A plain decoder: text only, one row of positions, which are the tokens' indices."""

    num_position_rows = 1

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def decoder(self) -> PreTrainedModel:
        """The language model without its head and without towers."""
        model: Any = self.model
        return cast(PreTrainedModel, model.get_decoder())

    def check(self, request: EngineRequest) -> None:
        """Raises what is wrong with the items; `encode` and `locate` take them for granted."""
        if request.items:
            raise UnsupportedContent("this model reads text only", field="items")

    def encode(self, request: EngineRequest) -> list[Tensor]:
        """For each item its embeddings, [placeholder length, hidden_size]."""
        raise NotImplementedError

    def locate(self, request: EngineRequest) -> PromptPositions:
        """Of a prompt with items; without them every token stands at its index."""
        raise NotImplementedError


class Qwen2VL(Family):
    """Still pictures arrive as one 8-bit frame, beside the table that makes them floats again.

    pixel_patches   [num_patches, channels, patch_height * patch_width] uint8
    pixel_table     [channels, 256] float32: what the image processor makes of each value
    image_grid_thw  [3] int64: patches in time (1), height and width
    """

    num_position_rows = 3

    def check(self, request: EngineRequest) -> None:
        for item in request.items:
            self._check_fields(item)
            self._check_placeholder(item, request.prompt_token_ids)
        _check_apart(_in_order(request.items))

    def encode(self, request: EngineRequest) -> list[Tensor]:
        pixel_values = torch.cat([self.restore(item) for item in request.items])
        tower: Any = self.model
        encoded = tower.get_image_features(
            pixel_values.to(self.model.device), _grids(request.items).to(self.model.device)
        )
        return list(encoded.pooler_output)

    def restore(self, item: Item) -> Tensor:
        """The processor's pixel_values, bit for bit: [num_patches, channels * frames * pixels]."""
        patches, table = item.fields["pixel_patches"], item.fields["pixel_table"]
        num_patches, channels, num_pixels = patches.shape
        # One flat table: the values of channel c start at 256 * c.
        entry = patches.int() + 256 * torch.arange(channels, dtype=torch.int32)[:, None]
        frame = table.flatten().index_select(0, entry.flatten())
        frames = self.model.config.vision_config.temporal_patch_size
        shape = (num_patches, channels, frames, num_pixels)
        return cast(
            Tensor, frame.view(num_patches, channels, 1, num_pixels).expand(shape).flatten(1)
        )

    def locate(self, request: EngineRequest) -> PromptPositions:
        token_ids = torch.tensor([request.prompt_token_ids])
        is_image = torch.zeros_like(token_ids)
        items = _in_order(request.items)
        for item in items:
            start = item.placeholder.offset
            is_image[0, start : start + item.placeholder.length] = 1
        model: Any = self.model
        positions, delta = model.model.get_rope_index(
            token_ids, mm_token_type_ids=is_image, image_grid_thw=_grids(items)
        )
        return PromptPositions(positions[:, 0], int(delta))

    def _check_fields(self, item: Item) -> None:
        vision = self.model.config.vision_config
        if item.modality != "image":
            raise UnsupportedContent(f"no {item.modality!r} input in this model", field="items")
        num_pixels = vision.patch_size**2
        patches = _field(item, "pixel_patches", torch.uint8, (-1, vision.in_channels, num_pixels))
        table = _field(item, "pixel_table", torch.float32, (vision.in_channels, 256))
        if not bool(table.isfinite().all()):
            _refuse("pixel_table holds values that are not finite")
        frames, height, width = _field(item, "image_grid_thw", torch.int64, (3,)).tolist()
        merge = vision.spatial_merge_size
        if frames != 1 or height <= 0 or width <= 0 or height % merge or width % merge:
            _refuse(
                f"image_grid_thw is {[frames, height, width]}; it must be one frame whose sides"
                f" are multiples of {merge}"
            )
        if height * width != len(patches):
            _refuse(f"image_grid_thw asks for {height * width} patches, there are {len(patches)}")

    def _check_placeholder(self, item: Item, prompt_token_ids: list[int]) -> None:
        start, length = item.placeholder.offset, item.placeholder.length
        merge = self.model.config.vision_config.spatial_merge_size
        num_embeddings = int(item.fields["image_grid_thw"].prod()) // merge**2
        if length != num_embeddings:
            _refuse(f"{length} placeholders for {num_embeddings} embeddings")
        image_token_id = self.model.config.image_token_id
        if start < 0 or prompt_token_ids[start : start + length] != [image_token_id] * length:
            _refuse(f"the prompt has no {length} image tokens at {start}")


def _in_order(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: item.placeholder.offset)


def _grids(items: Sequence[Item]) -> Tensor:  # [num_items, 3]
    return torch.stack([item.fields["image_grid_thw"] for item in items])


def _check_apart(items: Sequence[Item]) -> None:
    """transformers tells pictures apart by the text between them, so there must be some."""
    for left, right in itertools.pairwise(items):
        if left.placeholder.offset + left.placeholder.length >= right.placeholder.offset:
            _refuse("the placeholders of two pictures touch")


def _field(item: Item, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The field if it is what it must be; -1 in `shape` stands for any length."""
    tensor = item.fields.get(name)
    if not isinstance(tensor, Tensor):
        _refuse(f"{name} is missing")
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and all(
        want in (-1, have) for have, want in zip(actual, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        _refuse(f"{name} is {tensor.dtype} {list(actual)}; expected {dtype} {list(shape)}")
    return tensor


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, field="items")


def family_of(config: PreTrainedConfig) -> tuple[type[Family], Any] | None:
    """The family of a model and the transformers class that loads it; None where there is none."""
    match config.model_type:
        case "qwen2_vl":
            return Qwen2VL, Qwen2VLForConditionalGeneration
        case "qwen2_5_vl":
            return Qwen2VL, Qwen2_5_VLForConditionalGeneration
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Family, AutoModelForCausalLM
    return None
