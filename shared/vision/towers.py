"""Towers: the part of a multimodal model that makes embeddings of pictures.

An engine may have one beside its language model, or encoders do it for the engine. `TowerAdapter`
is what is known of a family without its weights, so an engine can check its items either way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from shared.errors import ConfigError, InvalidRequest
from shared.vision.layers import quicken, quicken_clip
from shared.vision.weights import load_weights

Fields = Mapping[str, Tensor]

# How many embeddings are made at once on a CPU: those of four pictures of 448 x 448 pixels. Runs of
# one took as long, and make threads wait for each other more often.
CPU_RUN_LEN = 1024

# Of every model that transformers makes of a tower and a language model.
LANGUAGE_MODULES = ("model.language_model", "lm_head")


class TowerAdapter:
    """How one family's pictures arrive, and what a tower makes of them."""

    modules: tuple[str, ...]
    """Names of the submodules that make embeddings."""
    metadata: tuple[str, ...] = ()
    """Fields that the language model needs too, for its positions."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config: Any = config
        self.hidden_size: int = config.get_text_config().hidden_size
        self.num_levels = 0
        """How many further levels of features stand behind each embedding, for the decoder's first
        layers (DeepStack)."""

    @property
    def width(self) -> int:
        """Of an embedding, all its levels together."""
        return (1 + self.num_levels) * self.hidden_size

    def count(self, fields: Fields) -> int:
        """How many embeddings the picture has; needs no more than its metadata.

        Raises InvalidRequest.
        """
        raise NotImplementedError

    def check(self, fields: Fields) -> None:
        """Raises InvalidRequest for fields that `encode` would stumble over."""
        raise NotImplementedError

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        """For each picture its embeddings, [count, width]."""
        raise NotImplementedError

    def quicken(self, model: Any) -> None:
        """Change the tower's layers for others that do the same sooner, if there are any."""

    def sample(self) -> Fields:
        """A small picture, to warm up with."""
        raise NotImplementedError

    def check_embedding(self, fields: Fields, embedding: Tensor) -> None:
        """Of embeddings that somebody else has made. Raises InvalidRequest."""
        shape = (self.count(fields), self.width)
        if not embedding.is_floating_point() or tuple(embedding.shape) != shape:
            _refuse(
                f"the embeddings are {embedding.dtype} {list(embedding.shape)}; expected"
                f" {list(shape)}"
            )
        _check_finite(embedding)


class QwenTower(TowerAdapter):
    """Still pictures arrive as one 8-bit frame, beside the table that makes them floats again.

    pixel_patches   [num_patches, channels, patch_height * patch_width] uint8
    pixel_table     [channels, 256] float32: what the image processor makes of each value
    image_grid_thw  [3] int64: patches in time (1), height and width
    """

    modules = ("model.visual",)
    metadata = ("image_grid_thw",)

    def count(self, fields: Fields) -> int:
        frames, height, width = _field(fields, "image_grid_thw", torch.int64, (3,)).tolist()
        merge = self._config.vision_config.spatial_merge_size
        if frames != 1 or height <= 0 or width <= 0 or height % merge or width % merge:
            _refuse(
                f"image_grid_thw is {[frames, height, width]}; it must be one frame whose sides"
                f" are multiples of {merge}"
            )
        return int(height * width // merge**2)

    def check(self, fields: Fields) -> None:
        vision = self._config.vision_config
        num_pixels = vision.patch_size**2
        patches = _field(fields, "pixel_patches", torch.uint8, (-1, vision.in_channels, num_pixels))
        _check_table(_field(fields, "pixel_table", torch.float32, (vision.in_channels, 256)))
        num_patches = self.count(fields) * vision.spatial_merge_size**2
        if num_patches != len(patches):
            _refuse(f"image_grid_thw asks for {num_patches} patches, there are {len(patches)}")

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        pixel_values = torch.cat([self.restore(fields) for fields in batch])
        grids = torch.stack([fields["image_grid_thw"] for fields in batch])
        return self._embed(model, pixel_values.to(model.device), grids.to(model.device))

    def quicken(self, model: Any) -> None:
        quicken(model.model.visual)

    def _embed(self, model: Any, pixel_values: Tensor, grids: Tensor) -> list[Tensor]:
        return list(model.get_image_features(pixel_values, grids).pooler_output)

    def sample(self) -> Fields:
        vision = self._config.vision_config
        side = 2 * vision.spatial_merge_size
        num_pixels = vision.patch_size**2
        return {
            "pixel_patches": torch.zeros(side**2, vision.in_channels, num_pixels).to(torch.uint8),
            "pixel_table": torch.zeros(vision.in_channels, 256),
            "image_grid_thw": torch.tensor([1, side, side]),
        }

    def restore(self, fields: Fields) -> Tensor:
        """The processor's pixel_values, bit for bit: [num_patches, channels * frames * pixels]."""
        patches = fields["pixel_patches"]
        num_patches, channels, num_pixels = patches.shape
        frame = _look_up(patches, fields["pixel_table"])
        frames = self._config.vision_config.temporal_patch_size
        shape = (num_patches, channels, frames, num_pixels)
        return frame.view(num_patches, channels, 1, num_pixels).expand(shape).flatten(1)


class Qwen3Tower(QwenTower):
    """As QwenTower; behind each embedding stand the features of earlier layers of the tower."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_levels = len(self._config.vision_config.deepstack_visual_indexes)

    def _embed(self, model: Any, pixel_values: Tensor, grids: Tensor) -> list[Tensor]:
        encoded = model.get_image_features(pixel_values, grids)
        levels = zip(encoded.pooler_output, *encoded.deepstack_features, strict=True)
        return [torch.cat(of_picture, dim=-1) for of_picture in levels]


class LlavaTower(TowerAdapter):
    """LLaVA 1.5: every picture is one square for a CLIP tower, and a projector follows.

    pixels       [channels, image_size, image_size] uint8
    pixel_table  [channels, 256] float32: what the image processor makes of each value
    """

    modules = ("model.vision_tower", "model.multi_modal_projector")

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        vision = self._config.vision_config
        if vision.model_type != "clip_vision_model":
            raise ConfigError(
                f"models.path: LLaVA is known with a CLIP tower, not with {vision.model_type!r}",
                field="models.path",
            )
        layers = self._config.vision_feature_layer
        # The embeddings before the first layer count as a layer's.
        num_layers = vision.num_hidden_layers + 1
        for layer in [layers] if isinstance(layers, int) else layers:
            if not -num_layers <= layer < num_layers:
                raise ConfigError(
                    f"models.path: vision_feature_layer {layer} is none of the tower's"
                    f" {num_layers}",
                    field="models.path",
                )

    def count(self, fields: Fields) -> int:
        vision = self._config.vision_config
        # CLIP puts a class token before the patches; "default" leaves it out.
        has_class = self._config.vision_feature_select_strategy == "full"
        return int((vision.image_size // vision.patch_size) ** 2 + has_class)

    def check(self, fields: Fields) -> None:
        vision = self._config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        _field(fields, "pixels", torch.uint8, shape)
        _check_table(_field(fields, "pixel_table", torch.float32, (vision.num_channels, 256)))

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        pixel_values = torch.stack([self.restore(fields) for fields in batch])
        return list(model.get_image_features(pixel_values.to(model.device)).pooler_output)

    def quicken(self, model: Any) -> None:
        quicken_clip(model.model.vision_tower, model.model.multi_modal_projector)

    def sample(self) -> Fields:
        vision = self._config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        return {
            "pixels": torch.zeros(shape, dtype=torch.uint8),
            "pixel_table": torch.zeros(vision.num_channels, 256),
        }

    def restore(self, fields: Fields) -> Tensor:
        """The processor's pixel_values, bit for bit: [channels, image_size, image_size]."""
        pixels = fields["pixels"]
        return _look_up(pixels.flatten(1), fields["pixel_table"]).view(pixels.shape)


@dataclass(frozen=True, slots=True)
class Tower:
    """Weights that make embeddings; the language model beside them is not used, if there is one."""

    vision: TowerAdapter
    model: PreTrainedModel

    @torch.inference_mode()
    def encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        """For each picture its embeddings, [count, width], on the tower's device.

        Raises InvalidRequest if those of a picture are not finite.
        """
        embeddings = []
        for run in self._runs(batch):
            embeddings += self.vision.encode(self.model, run)
        for embedding in embeddings:
            _check_finite(embedding)
        return embeddings

    def _runs(self, batch: Sequence[Fields]) -> list[list[Fields]]:
        """What goes through the tower at once, in the order of the batch."""
        if self.model.device.type != "cpu":
            return [list(batch)]
        runs: list[list[Fields]] = []
        room = 0
        for fields in batch:
            count = self.vision.count(fields)
            if count > room:
                runs.append([])
                room = CPU_RUN_LEN
            runs[-1].append(fields)
            room -= count
        return runs


_FAMILIES: dict[str, tuple[type[TowerAdapter], Any]] = {
    "qwen2_vl": (QwenTower, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (QwenTower, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3Tower, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3Tower, Qwen3VLMoeForConditionalGeneration),
    "llava": (LlavaTower, LlavaForConditionalGeneration),
}


def vision_of(config: PreTrainedConfig) -> tuple[TowerAdapter, Any] | None:
    """What a model sees with, and the transformers class of the whole; None if it does not see."""
    found = _FAMILIES.get(config.model_type)
    return None if found is None else (found[0](config), found[1])


def load_tower(folder: Path, dtype: torch.dtype, device: str) -> Tower:
    """The tower of a model's folder, without its language model. Raises ConfigError."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    found = vision_of(config)
    if found is None:
        raise ConfigError(
            f"models.path: {folder}: a model of type {config.model_type!r} has no tower",
            field="models.path",
        )
    vision, model_class = found
    model = load_weights(model_class, folder, dtype, device, LANGUAGE_MODULES)
    vision.quicken(model)
    tower = Tower(vision, model)
    # What happens only once happens now, and a tower that cannot see says so.
    tower.encode([vision.sample()])
    return tower


def _field(fields: Fields, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The field if it is what it must be; -1 in `shape` stands for any length."""
    tensor = fields.get(name)
    if not isinstance(tensor, Tensor):
        _refuse(f"{name} is missing")
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and all(
        want in (-1, have) for have, want in zip(actual, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        _refuse(f"{name} is {tensor.dtype} {list(actual)}; expected {dtype} {list(shape)}")
    return tensor


def _look_up(pixels: Tensor, table: Tensor) -> Tensor:
    """The values of the pixels: [..., channels, num_pixels] uint8, as float32."""
    # One flat table: the values of channel c start at 256 * c.
    entry = pixels.int() + 256 * torch.arange(len(table), dtype=torch.int32)[:, None]
    return table.flatten().index_select(0, entry.flatten()).view(pixels.shape)


def _check_table(table: Tensor) -> None:
    if not bool(table.isfinite().all()):
        _refuse("pixel_table holds values that are not finite")


def _check_finite(embedding: Tensor) -> None:
    if not bool(embedding.isfinite().all()):
        _refuse("the embeddings hold values that are not finite")


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, field="items")
