"""Qwen-Image-Edit: the text encoder sees the image, and its latents follow the painted ones.

The operations have the order of `QwenImageEditPipeline`, so that the images are the same.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

from shared.codec.tensors import from_torch
from shared.errors import InvalidMedia, InvalidRequest
from shared.models.image_family import ImageFamily
from shared.models.image_folder import ImageFolder
from workers.generator.core.denoising import Condition, InputImage, Pixels, Size, size_of
from workers.generator.diffusion.packing import pack
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.pixels import normalized
from workers.generator.diffusion.qwen_image import (
    INPUT,
    OTHER_INPUTS,
    Networks,
    QwenImage,
    load_networks,
)

INSTRUCTION = (
    "Describe the key features of the input image (color, shape, size, texture, objects,"
    " background), then explain how the user's text instruction should alter or modify the image."
    " Generate a new image that meets the user's requirements while maintaining consistency with"
    " the original input where appropriate."
)
PROCESSOR = "processor"
IMAGE_TOKEN = "<|image_pad|>"
IMAGE_MARK = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
AREA = 1024 * 1024
SIDE = 32
"""Widths and heights of images are multiples of this in the sizes in which networks read them."""
MAX_RATIO = 100
"""Limit on the ratio of an image's sides. Beyond 200, its processor accepts no image."""

Edit = TypeVar("Edit", bound="QwenImageEdit")


class QwenImageEdit(QwenImage):
    """The networks of Qwen-Image-Edit with their processor."""

    instruction: ClassVar = INSTRUCTION
    num_template_tokens: ClassVar = 64
    area: ClassVar = AREA
    """Approximate number of pixels of an image for the latents."""
    text_area: ClassVar = AREA
    """Approximate number of pixels of an image for the encoder of texts."""

    def __init__(
        self, family: ImageFamily, tokenizer: Any, image_processor: Any, networks: Networks
    ) -> None:
        super().__init__(family, tokenizer, networks)
        self.max_input_images = family.input_images
        self._image_processor = image_processor
        self._vae_processor = VaeImageProcessor(vae_scale_factor=self._multiple)
        self._image_token_id = networks.text_encoder.config.image_token_id

    def check_text(self, text: str, field: str) -> int:
        if self._image_token_id in self._tokenize(text):
            raise InvalidRequest(
                f"{field}: the text has {IMAGE_TOKEN}, which is the place of an image", field=field
            )
        return super().check_text(text, field)

    def read_image(self, image: Pixels, field: str) -> InputImage:
        height, width, _ = image.shape
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidMedia(
                f"an image of {width} x {height} is too narrow: one side may have at most"
                f" {MAX_RATIO} times the length of the other one",
                field=field,
            )
        file = Image.fromarray(image)
        areas = self.text_area, self.area
        return InputImage(*(self._resized(file, fitted((width, height), area)) for area in areas))

    @torch.inference_mode()
    def encode_edit(self, texts: Sequence[str], images: Sequence[InputImage]) -> list[Condition]:
        latents = from_torch(torch.cat([self._latents(image.for_latents) for image in images]))
        sizes = tuple(size_of(image.for_latents) for image in images)
        inputs = self._image_processor(
            images=[Image.fromarray(image.for_text) for image in images], return_tensors="pt"
        ).to(self._text_encoder.device)
        conditions = []
        for text in texts:
            token_ids = self._expanded(self.marks(len(images)) + text, inputs["image_grid_thw"])
            prompt = self._states(token_ids, **inputs)
            arrays = {"prompt": from_torch(prompt), INPUT: latents}
            conditions.append(Condition(arrays, len(prompt), sizes))
        return conditions

    def marks(self, num_images: int) -> str:
        """Return the text before a prompt, with the places of the images."""
        return IMAGE_MARK * num_images

    def _expanded(self, text: str, grids: Tensor) -> list[int]:
        """Return the tokens of a text. The place of an image has a token for each embedding."""
        counts = iter((grids.prod(-1) // self._image_processor.merge_size**2).tolist())
        token_ids: list[int] = []
        for token_id in self._tokenize(text):
            count = next(counts) if token_id == self._image_token_id else 1
            token_ids += [token_id] * count
        return token_ids

    def _resized(self, image: Image.Image, size: Size) -> Pixels:
        width, height = size
        return np.asarray(self._vae_processor.resize(image, height, width))

    def _latents(self, image: Pixels) -> Tensor:
        """Return the packed latents of an image, [patches, channels]."""
        width, height = size = size_of(image)
        values = self._vae_processor.preprocess(Image.fromarray(image), height, width)
        values = values.unsqueeze(2).to(self._vae.device, self._vae.dtype)
        latents = self._vae.encode(values).latent_dist.mode()
        latents = normalized(latents, self._vae.config)[0, :, 0]
        return pack(latents, *self._grid(size)).to(self._transformer.dtype)


def fitted(size: Size, area: int) -> Size:
    """Return the size of about `area` pixels with the aspect ratio of an image of this size."""
    ratio = size[0] / size[1]
    width = math.sqrt(area * ratio)
    return round(width / SIDE) * SIDE, round(width / ratio / SIDE) * SIDE


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> QwenImageEdit:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    return load_as(QwenImageEdit, folder, dtype, device, sizes, key, report)


def load_as(
    model_class: type[Edit],
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
    refused: Sequence[str] = OTHER_INPUTS,
) -> Edit:
    """Load a model as `load` does; `refused` are settings of its transformer.

    Raises ConfigError.
    """
    parts = PartLoader(folder, dtype, device, report)
    # The pipeline reads texts with the processor's own tokenizer.
    tokenizer = parts.load_tokenizer(Qwen2Tokenizer, PROCESSOR)
    processor = parts.load_image_processor(Qwen2VLImageProcessorPil, PROCESSOR)
    networks = load_networks(parts, sizes, key, without=("lm_head",), refused=refused)
    return model_class(folder.family, tokenizer, processor, networks)
