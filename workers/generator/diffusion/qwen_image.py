"""Qwen-Image, one step at a time: each row of a batch may be at another step.

The operations have the order of `QwenImagePipeline`, so that the images are the same.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.errors import ConfigError, ContextTooLong, WorkerFailure
from shared.models.image_folder import ImageFolder
from shared.vision.weights import load_weights
from workers.generator.core.denoising import (
    Condition,
    Noise,
    Pixels,
    Progress,
    Size,
    Step,
    Stepped,
    check_sizes,
)
from workers.generator.diffusion.parts import load_module, refusing

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity,"
    " text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    "{}<|im_end|>\n<|im_start|>assistant\n"
)
NUM_TEMPLATE_TOKENS = 34
"""Tokens before the text. The network does not read their states."""
# Settings of the transformer that change its inputs, as in models that edit images.
OTHER_INPUTS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
PATCH = 2
"""Side of a patch in latents."""
# 2048x2048 pixels of the published model. One image must not take all the memory.
MAX_PATCHES = 16_384


class Schedule(NamedTuple):
    """Noise levels of an image, which depend on its number of steps and of patches."""

    sigmas: Tensor
    """float32 [steps + 1]; the last one is 0."""
    times: Tensor
    """float32 [steps]"""


class QwenImage:
    """The three networks of Qwen-Image with their tokenizer and scheduler.

    Latents are packed: [patches, channels], where a patch is 2x2 latents.
    """

    min_guidance = 1.0

    def __init__(
        self,
        folder: ImageFolder,
        tokenizer: Any,
        text_encoder: Any,
        transformer: Any,
        vae: Any,
        scheduler: Any,
    ) -> None:
        self.empty_negative = folder.family.empty_negative
        self._max_tokens = folder.family.max_prompt_tokens
        self._tokenizer, self._text_encoder = tokenizer, text_encoder
        self._transformer, self._vae, self._scheduler = transformer, vae, scheduler
        self._schedule = lru_cache(256)(self._make_schedule)
        self._multiple = _multiple_of(vae)

    def check_text(self, text: str, field: str) -> int:
        num_tokens = len(self._tokenize(text)) - NUM_TEMPLATE_TOKENS
        if num_tokens > self._max_tokens:
            raise ContextTooLong(
                f"{field}: the text has {num_tokens} tokens, over the model's limit of"
                f" {self._max_tokens}",
                field=field,
            )
        return num_tokens

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> list[Condition]:
        return [self._encode(text) for text in texts]

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        channels = self._transformer.config.in_channels // PATCH**2
        rows, columns = self._grid(size)
        return channels, PATCH * rows, PATCH * columns

    def begin(self, size: Size, noise: Noise) -> Progress:
        rows, columns = self._grid(size)
        patches = torch.from_numpy(noise).view(-1, rows, PATCH, columns, PATCH)
        packed = patches.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        return Progress(from_torch(packed.to(self._transformer.dtype)), {})

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [to_torch(step.progress.latents).to(self._transformer.device) for step in steps]
        schedules = [self._schedule(step.steps, len(images[0])) for step in steps]
        times = [
            schedule.times[step.number] for step, schedule in zip(steps, schedules, strict=True)
        ]
        velocities = self._predict(steps[0].size, images, times, [step.prompt for step in steps])
        # As in the pipeline, texts to guide away from have a second call: then an image that is
        # alone in its batch has the pipeline's last bits in every dtype.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        if guided:
            negatives = self._predict(
                steps[0].size,
                [images[n] for n in guided],
                [times[n] for n in guided],
                list(guided.values()),
            )
            for n, negative in zip(guided, negatives, strict=True):
                velocities[n] = _guided(velocities[n], negative, steps[n].guidance)
        return [
            _stepped(image, velocity, schedule.sigmas[step.number :])
            for step, image, velocity, schedule in zip(
                steps, images, velocities, schedules, strict=True
            )
        ]

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        values = self.decode(latents, size).permute(1, 2, 0).cpu().float().numpy()
        return np.asarray((values * 255).round(), np.uint8)

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        """Return the image of finished latents, [3, height, width], with values from 0 to 1.

        Raises WorkerFailure for values that are not finite, which diffusers paints black.
        """
        config, (rows, columns) = self._vae.config, self._grid(size)
        patches = to_torch(latents).view(rows, columns, -1, PATCH, PATCH)
        unpacked = patches.permute(2, 0, 3, 1, 4).reshape(1, -1, 1, PATCH * rows, PATCH * columns)
        image = unpacked.to(self._vae.device, self._vae.dtype)
        # The order of the operations is the pipeline's, or the last bits would differ.
        inverse = 1.0 / _per_channel(config.latents_std, image)
        image = image / inverse + _per_channel(config.latents_mean, image)
        decoded: Tensor = self._vae.decode(image, return_dict=False)[0][0, :, 0]
        if not bool(decoded.isfinite().all()):
            raise WorkerFailure(
                "the image has values that are not finite: the networks overflow in"
                f" {self._transformer.dtype}"
            )
        return (decoded * 0.5 + 0.5).clamp(0, 1)

    def _grid(self, size: Size) -> tuple[int, int]:
        """Return the number of rows and columns of patches."""
        width, height = size
        return height // self._multiple, width // self._multiple

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(TEMPLATE.format(text)).ids
        return token_ids

    def _encode(self, text: str) -> Condition:
        token_ids = torch.tensor([self._tokenize(text)], device=self._text_encoder.device)
        # A mask of ones, because without one transformers reuses positions of the last text.
        states = self._text_encoder.model(
            input_ids=token_ids, attention_mask=torch.ones_like(token_ids)
        ).last_hidden_state
        prompt = states[0, NUM_TEMPLATE_TOKENS:]
        return Condition({"prompt": from_torch(prompt)}, len(prompt))

    def _predict(
        self,
        size: Size,
        images: Sequence[Tensor],
        times: Sequence[Tensor],
        texts: Sequence[Condition],
    ) -> list[Tensor]:
        """Return the velocity of each image, [patches, channels], with its text at its time."""
        prompts, mask = self._padded(texts)
        predicted = self._transformer(
            hidden_states=torch.stack(list(images)),
            timestep=torch.stack(list(times)).to(prompts.dtype) / 1000,
            encoder_hidden_states=prompts,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *self._grid(size))]] * len(images),
            return_dict=False,
        )[0]
        return list(predicted)

    def _padded(self, texts: Sequence[Condition]) -> tuple[Tensor, Tensor | None]:
        """Return texts as [texts, tokens, width], and the mask of their tokens if some are shorter.

        The pipeline has no mask for a text that is alone.
        """
        prompts = [to_torch(text.arrays["prompt"]) for text in texts]
        device, dtype = self._transformer.device, self._transformer.dtype
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device, dtype)
        lengths = torch.tensor([text.num_tokens for text in texts], device=device)
        mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]
        return padded, None if mask.all() else mask

    def _make_schedule(self, steps: int, num_patches: int) -> Schedule:
        # A scheduler counts its steps, so this one is used for its tables alone.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler.config)
        config = scheduler.config
        first = config.get("base_image_seq_len", 256)
        slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (
            config.get("max_image_seq_len", 4096) - first
        )
        shift = num_patches * slope + (config.get("base_shift", 0.5) - slope * first)
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps), device=self._transformer.device, mu=shift
        )
        return Schedule(scheduler.sigmas, scheduler.timesteps)


def _guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Return the guided prediction, which has the norm of the one with the prompt."""
    combined = negative + scale * (positive - negative)
    norms = [torch.norm(value, dim=-1, keepdim=True) for value in (positive, combined)]
    guided: Tensor = combined * (norms[0] / norms[1])
    return guided


def _stepped(latents: Tensor, velocity: Tensor, sigmas: Tensor) -> Stepped:
    """Return an image at the second of `sigmas`; its latents are at the first.

    As in the scheduler, latents are rounded to float32 before a step.
    """
    sample = latents.to(torch.float32)
    moved = (sample + (sigmas[1] - sigmas[0]) * velocity).to(velocity.dtype)
    finished = (sample - sigmas[0] * velocity).to(velocity.dtype)
    return Stepped(Progress(from_torch(moved), {}), from_torch(finished))


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> QwenImage:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """

    def begin(name: str) -> tuple[Path, torch.dtype, str]:
        mib = folder.num_bytes(name, dtype) / 2**20
        report(f"loading the {name.replace('_', ' ')}, {mib:.0f} MiB")
        return folder.folder / name, getattr(torch, folder.served_dtype(name, dtype)), device

    scheduler = _load_scheduler(folder.folder / "scheduler")
    with refusing(folder.folder / "tokenizer"):
        tokenizer = Qwen2Tokenizer.from_pretrained(
            folder.folder / "tokenizer", local_files_only=True
        ).backend_tokenizer
        # Several threads read texts, and a change of these settings is not thread-safe.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    # The smallest part is first: its settings decide which sizes there are.
    vae = load_module(AutoencoderKLQwenImage, *begin("vae"))
    check_sizes(sizes, _multiple_of(vae), MAX_PATCHES, key)
    text_encoder = load_weights(
        Qwen2_5_VLForConditionalGeneration,
        *begin("text_encoder"),
        without=("model.visual", "lm_head"),
    )
    transformer = load_module(QwenImageTransformer2DModel, *begin("transformer"))
    for name in OTHER_INPUTS:
        if transformer.config.get(name):
            raise ConfigError(
                f"models.path: {folder.folder}: {name} of the transformer is not supported",
                field="models.path",
            )
    return QwenImage(folder, tokenizer, text_encoder, transformer, vae, scheduler)


def _load_scheduler(folder: Path) -> Any:
    with refusing(folder):
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, local_files_only=True)
        if scheduler.config.stochastic_sampling:
            raise ValueError("stochastic_sampling is not supported")
    return scheduler


def _multiple_of(vae: Any) -> int:
    """Return the side of a patch in pixels."""
    num_halvings = len(vae.temperal_downsample)
    return PATCH << num_halvings
