"""Painter from a folder: its files, and the denoising steps of a batch of images."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.errors import ConfigError, ContextTooLong
from shared.helpers.validation import reason_of
from shared.vision.quantized import find_quantization, find_quantized_tensor
from workers.generator.core.denoising import (
    Condition,
    ImageModel,
    Noise,
    Pixels,
    Progress,
    Size,
    Step,
    Stepped,
    check_sizes,
)
from workers.generator.painter import (
    CHANNELS,
    HEAD_WIDTH,
    Painter,
    PainterShape,
    places_of,
    to_images,
    to_patches,
)

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
# Attention over the patches of an image is quadratic, and one image must not take all the memory.
MAX_PATCHES = 4096

Count = Annotated[int, Meta(ge=1, le=2**16)]


class PainterConfig(Struct, frozen=True):
    """Content of a painter's `config.json`."""

    model_type: Literal["pagemill_painter"]
    width: Annotated[int, Meta(ge=HEAD_WIDTH, le=8192, multiple_of=HEAD_WIDTH)]
    depth: Annotated[int, Meta(ge=1, le=256)]
    patch: Annotated[int, Meta(ge=1, le=64)]
    num_tokens: Count
    max_text: Annotated[int, Meta(ge=1, le=1024)]
    pad_token_id: Annotated[int, Meta(ge=0)]
    scale: Annotated[int, Meta(ge=1, le=64)]
    """Factor between the sides of an image and the sides of its latents."""

    @property
    def multiple(self) -> int:
        """Widths and heights are multiples of this."""
        return self.patch * self.scale

    @property
    def shape(self) -> PainterShape:
        return PainterShape(self.width, self.depth, self.patch, self.num_tokens, self.max_text)


class PainterModel:
    """A painter with its tokenizer. Latents are the pixels of a smaller image, from -1 to 1."""

    empty_negative: str | None = ""
    min_guidance = 0.0
    no_guidance = 1.0

    def __init__(
        self,
        config: PainterConfig,
        network: Painter,
        tokenize: Callable[[str], list[int]],
        dtype: torch.dtype,
    ) -> None:
        self._config, self._tokenize, self._dtype = config, tokenize, dtype
        self._network = network.to(dtype).eval().requires_grad_(requires_grad=False)
        self._places: dict[tuple[int, int], torch.Tensor] = {}

    def check_text(self, text: str, field: str) -> int:
        num_tokens, limit = len(self._tokenize(text)), self._config.max_text
        if num_tokens > limit:
            raise ContextTooLong(
                f"{field}: the text has {num_tokens} tokens, over the painter's limit of {limit}",
                field=field,
            )
        return num_tokens

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        token_ids = [np.array(self._tokenize(text), np.int64) for text in texts]
        return [Condition({"tokens": from_numpy(ids)}, len(ids)) for ids in token_ids]

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        width, height = size
        return CHANNELS, height // self._config.scale, width // self._config.scale

    def begin(self, size: Size, noise: Noise) -> Progress:
        return Progress(from_torch(torch.from_numpy(noise).to(self._dtype)), {})

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        patch = self._config.patch
        latents = torch.stack([to_torch(step.progress.latents) for step in steps])
        _, _, height, width = latents.shape
        patches = to_patches(latents, patch)
        # Guidance needs a second row: the image without the prompt, or with the negative prompt.
        guided = [n for n, step in enumerate(steps) if step.negative is not None]
        negatives = [step.negative for step in steps if step.negative is not None]
        texts = [*(step.prompt for step in steps), *negatives]
        rows = torch.tensor([*range(len(steps)), *guided])
        times = torch.tensor([step.number / step.steps for step in steps], dtype=self._dtype)
        places = self._places_of(height // patch, width // patch)
        painted = self._network(patches[rows], times[rows], self._padded(texts), places)
        finished = painted[: len(steps)].clone()
        for number, other in zip(guided, painted[len(steps) :], strict=True):
            finished[number] = torch.lerp(other, painted[number], steps[number].guidance)
        images = to_images(finished, patch, height // patch)
        return [
            Stepped(Progress(from_torch(_moved(step, before, image)), {}), from_torch(image))
            for step, before, image in zip(steps, latents, images, strict=True)
        ]

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        values = np.rint(np.clip(to_numpy(latents), -1, 1) * 127.5 + 127.5).astype(np.uint8)
        small = Image.fromarray(np.ascontiguousarray(values.transpose(1, 2, 0)))
        return np.asarray(small.resize(size, Image.Resampling.BICUBIC))

    def _padded(self, texts: Sequence[Condition]) -> torch.Tensor:
        """Return the tokens of texts, [texts, max_text]."""
        padded = torch.full((len(texts), self._config.max_text), self._config.pad_token_id)
        for row, text in zip(padded, texts, strict=True):
            row[: text.num_tokens] = to_torch(text.arrays["tokens"])
        return padded

    def _places_of(self, rows: int, columns: int) -> torch.Tensor:
        if (rows, columns) not in self._places:
            self._places[rows, columns] = places_of(rows, columns).to(self._dtype)
        return self._places[rows, columns]


def _moved(step: Step, latents: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Return the latents at the next time, on the line from the latents to the finished image."""
    time, next_time = step.number / step.steps, (step.number + 1) / step.steps
    part = (next_time - time) / (1 - time)
    return latents + part * (finished - latents)


def load_painter(folder: Path, dtype: str, sizes: Sequence[str], key: str) -> ImageModel:
    """Load the painter of a folder for these sizes; `key` is the stage's key in the settings.

    Raises ConfigError, which names the file.
    """
    file = folder / CONFIG_FILE
    try:
        config = msgspec.json.decode(file.read_bytes(), type=PainterConfig)
        network = Painter(config.shape)
        file = folder / WEIGHTS_FILE
        weights = load_file(file)
        if reason := find_quantization(folder) or find_quantized_tensor(folder, network, str):
            raise ConfigError(f"{key}.path: {folder} {reason}", field=f"{key}.path")
        network.load_state_dict(weights)
        file = folder / TOKENIZER_FILE
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except (OSError, msgspec.DecodeError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{key}.path: {file}: {reason_of(error)}", field=f"{key}.path") from error
    except Exception as error:
        # The tokenizers library raises plain Exceptions.
        if type(error) is not Exception:
            raise
        raise ConfigError(f"{key}.path: {file}: {reason_of(error)}", field=f"{key}.path") from error
    if max(config.pad_token_id + 1, tokenizer.get_vocab_size()) > config.num_tokens:
        message = f"{file}: more tokens than num_tokens of {CONFIG_FILE}, {config.num_tokens}"
        raise ConfigError(f"{key}.path: {message}", field=f"{key}.path")

    def tokenize(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    check_sizes(sizes, config.multiple, MAX_PATCHES, key)
    return PainterModel(config, network, tokenize, getattr(torch, dtype))
