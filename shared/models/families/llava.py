"""LLaVA 1.5: every image is one square for a CLIP tower with a projector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, WireField
from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.models import layout, wire_pixels
from shared.models.family import MediaInput, ModelFamily
from shared.models.lazy_module import LazyModule
from shared.models.media import DecodedImage
from shared.models.tower_adapter import Fields, TowerAdapter, check_table, get_field, look_up
from shared.native.choices import KernelSetting
from shared.protocol.multimodal import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    torch = LazyModule("torch")


class LlavaSettings(msgspec.Struct, frozen=True):
    """Settings in processor_config.json that determine LLaVA's number of tokens."""

    patch_size: int
    vision_feature_select_strategy: Literal["default", "full"] | None = None
    num_additional_image_tokens: int = 0


class LlavaImageLayout(layout.ImageLayout):
    """One square per image.

    pixels      uint8 [channels, image_size, image_size], resized and cropped
    pixel_table float32 [channels, 256], the normalised value of every pixel value
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = layout.load_image_processor(folder, CLIPImageProcessorPil)
        self._settings = _read_settings(folder)
        table = layout.value_table(self._processor)
        self._table = from_numpy(table)
        self.fingerprint = layout.fingerprint(self._processor, self._settings)
        vision = config.vision_config
        self._shape = (vision.num_channels, vision.image_size, vision.image_size)
        try:
            self._check_settings(config)
            self._check_output(config.vision_config, table)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error.message}", field="path") from None

    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        layout.check_aspect_ratio(media.image, field)
        pixels = self._crop(media.image)
        fields = {"pixels": from_numpy(pixels), "pixel_table": self._table}
        return fields, self._count_tokens(*pixels.shape[1:])

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        pixels, table = to_numpy(fields["pixels"]), to_numpy(fields["pixel_table"])
        values = table[np.arange(len(table))[:, None, None], pixels]
        return {"pixel_values": WireField(from_numpy(values), BatchedField())}

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        (values,) = wire_pixels.tensors_of(wire, ("pixel_values",), field)
        wire_pixels.check_shape("pixel_values", values, self._shape, field)
        pixels, table = wire_pixels.to_pixels(to_numpy(values)[None], self._table, field)
        fields = {"pixels": from_numpy(pixels[0]), "pixel_table": table}
        return fields, self._count_tokens(*self._shape[1:])

    def _crop(self, image: Image.Image) -> NDArray[np.uint8]:  # [channels, height, width]
        output = self._processor(
            images=[image], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        return np.ascontiguousarray(output["pixel_values"][0], dtype=np.uint8)

    def _count_tokens(self, height: int, width: int) -> int:
        settings = self._settings
        num_patches = (height // settings.patch_size) * (width // settings.patch_size)
        num_dropped = settings.vision_feature_select_strategy == "default"
        return num_patches + settings.num_additional_image_tokens - num_dropped

    def _check_settings(self, config: Any) -> None:
        vision = config.vision_config
        if vision.model_type != "clip_vision_model":
            raise ConfigError(
                f"LLaVA is supported with a CLIP tower, not with {vision.model_type!r}"
            )
        if self._settings.patch_size != vision.patch_size:
            raise ConfigError(
                f"processor_config.json has patch_size {self._settings.patch_size}, but the vision"
                f" tower has {vision.patch_size}"
            )
        num_embeddings = _count_embeddings(config)
        num_tokens = self._count_tokens(vision.image_size, vision.image_size)
        if num_tokens != num_embeddings:
            raise ConfigError(
                f"with processor_config.json, an image has {num_tokens} tokens, but the model"
                f" computes {num_embeddings} embeddings: num_additional_image_tokens or"
                " vision_feature_select_strategy does not match the model"
            )

    def _check_output(self, vision: Any, table: NDArray[np.float32]) -> None:
        """Process an image of each orientation, because settings combine in many ways."""
        rows, columns = np.indices((40, 60), dtype=np.uint8)
        raster = np.stack([4 * columns, 6 * rows, columns + rows], axis=-1)
        for image in (Image.fromarray(raster), Image.fromarray(raster.swapaxes(0, 1).copy())):
            pixels = self._crop(image)
            if pixels.shape != self._shape:
                raise ConfigError(
                    f"the image processor returns {list(pixels.shape)} for an image, but the vision"
                    f" tower needs {list(self._shape)}"
                )
            whole = self._processor(images=[image], return_tensors="np")["pixel_values"][0]
            if not np.array_equal(table[np.arange(len(table))[:, None, None], pixels], whole):
                raise ConfigError("the image processor does more than rescale and normalise")


class LlavaTower(TowerAdapter):
    """A CLIP tower with a projector, for the fields of `LlavaImageLayout`."""

    modules = ("model.vision_tower", "model.multi_modal_projector")

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        vision = self._config.vision_config
        if vision.model_type != "clip_vision_model":
            raise ConfigError(
                "models.path: LLaVA is supported with a CLIP tower, not with"
                f" {vision.model_type!r}",
                field="models.path",
            )
        layers = self._config.vision_feature_layer
        # The embeddings before the first layer count as a layer.
        num_layers = vision.num_hidden_layers + 1
        for layer in [layers] if isinstance(layers, int) else layers:
            if not -num_layers <= layer < num_layers:
                raise ConfigError(
                    f"models.path: vision_feature_layer {layer} is not one of the tower's"
                    f" {num_layers} layers",
                    field="models.path",
                )

    def count(self, fields: Fields) -> int:
        return _count_embeddings(self._config)

    def check(self, fields: Fields) -> None:
        vision = self._config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        get_field(fields, "pixels", torch.uint8, shape)
        check_table(get_field(fields, "pixel_table", torch.float32, (vision.num_channels, 256)))

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        tower = model.model.vision_tower
        pixel_values = torch.stack([self.restore(fields, tower) for fields in batch])
        return list(model.get_image_features(pixel_values).pooler_output)

    def optimize_layers(self, model: Any, kernels: KernelSetting = "measured") -> None:
        from shared.vision.layers import optimize_clip

        optimize_clip(model.model.vision_tower, model.model.multi_modal_projector, kernels)

    def sample(self) -> Fields:
        vision = self._config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        return {
            "pixels": torch.zeros(shape, dtype=torch.uint8),
            "pixel_table": torch.zeros(vision.num_channels, 256),
        }

    def restore(self, fields: Fields, tower: PreTrainedModel | None = None) -> Tensor:
        """Return the processor's pixel_values, bit for bit: [channels, image_size, image_size].

        For `tower` see `look_up`.
        """
        pixels = fields["pixels"]
        return look_up(pixels.flatten(1), fields["pixel_table"], tower).view(pixels.shape)


def _count_embeddings(config: Any) -> int:
    vision = config.vision_config
    # CLIP puts a class token before the patches; the strategy "default" drops it.
    has_class = config.vision_feature_select_strategy == "full"
    return int((vision.image_size // vision.patch_size) ** 2 + has_class)


def _read_settings(folder: Path) -> LlavaSettings:
    try:
        return msgspec.json.decode(
            (folder / "processor_config.json").read_bytes(), type=LlavaSettings
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{folder}: processor_config.json: {reason_of(error)}", field="path"
        ) from error


FAMILIES = (
    ModelFamily(
        "LLaVA 1.5",
        frozenset({"llava"}),
        media={IMAGE: MediaInput(LlavaImageLayout, placeholder="image_token_id")},
        tower=LlavaTower,
    ),
)
