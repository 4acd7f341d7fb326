"""PixArt-Sigma, one step at a time: each row of a batch may be at another step.

The operations have the order of `PixArtSigmaPipeline`, so that the images are the same.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel
from torch import Tensor
from transformers import T5EncoderModel, T5Tokenizer

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.models.image_folder import ImageFolder
from workers.generator.core.denoising import (
    Condition,
    Noise,
    Pixels,
    Progress,
    Size,
    Step,
    Stepped,
    check_num_tokens,
    check_sizes,
)
from workers.generator.diffusion import autoencoder_kl, dpm_solver
from workers.generator.diffusion.flow_match import Schedule
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.pixels import to_pixels, to_unit

# 2048x2048 pixels of the published model. One image must not take all the memory.
MAX_PATCHES = 16_384


class PixArtSigma:
    """The three networks of PixArt-Sigma with their tokenizer and scheduler.

    Latents are [channels, rows, columns]. Texts are changed to lower case, as in the pipeline
    without its cleaning of captions from the web.
    """

    min_guidance = no_guidance = 1.0

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
        self._scale = autoencoder_kl.scale_of(vae)
        self._schedule = lru_cache(256)(self._make_schedule)

    def check_text(self, text: str, field: str) -> int:
        return check_num_tokens(len(self._tokenize(text)), self._max_tokens, field)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> list[Condition]:
        return [self._encode(text) for text in texts]

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        width, height = size
        return self._transformer.config.in_channels, height // self._scale, width // self._scale

    def begin(self, size: Size, noise: Noise) -> Progress:
        return dpm_solver.begin(torch.from_numpy(noise).to(self._transformer.dtype))

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [to_torch(step.progress.latents) for step in steps]
        schedules = [self._schedule(step.steps) for step in steps]
        times = [
            schedule.times[step.number] for step, schedule in zip(steps, schedules, strict=True)
        ]
        # As in the pipeline, texts to guide away from are the first rows of the same call.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        rows = [*guided, *range(len(steps))]
        texts = [*guided.values(), *(step.prompt for step in steps)]
        predictions = self._predict([images[n] for n in rows], [times[n] for n in rows], texts)
        negatives, positives = predictions[: len(guided)], predictions[len(guided) :]
        for n, negative in zip(guided, negatives, strict=True):
            positives[n] = negative + steps[n].guidance * (positives[n] - negative)
        config = self._scheduler.config
        return [
            dpm_solver.stepped(config, schedule, step.number, step.progress, predicted)
            for step, predicted, schedule in zip(steps, positives, schedules, strict=True)
        ]

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        return to_pixels(self.decode(latents, size))

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        """Return the image of finished latents, [3, height, width], with values from 0 to 1.

        Raises WorkerFailure for values that are not finite.
        """
        decoded = autoencoder_kl.decode(self._vae, to_torch(latents))
        return to_unit(decoded, self._transformer.dtype)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text.lower().strip()).ids
        return token_ids

    def _encode(self, text: str) -> Condition:
        token_ids = self._tokenize(text)
        # Padded as in the pipeline, whose transformer was trained with texts of one length.
        padded = torch.zeros((1, self._max_tokens), dtype=torch.int64)
        padded[0, : len(token_ids)] = torch.tensor(token_ids)
        device = self._text_encoder.device
        mask = self._mask([len(token_ids)]).to(device)
        states = self._text_encoder(padded.to(device), attention_mask=mask).last_hidden_state
        return Condition({"prompt": from_torch(states[0])}, len(token_ids))

    def _predict(
        self, images: Sequence[Tensor], times: Sequence[Tensor], texts: Sequence[Condition]
    ) -> list[Tensor]:
        """Return the prediction for each image with its text at its time, of the image's shape."""
        device, dtype = self._transformer.device, self._transformer.dtype
        prompts = torch.stack([to_torch(text.arrays["prompt"]) for text in texts])
        predicted = self._transformer(
            torch.stack(list(images)).to(device),
            encoder_hidden_states=prompts.to(device, dtype),
            encoder_attention_mask=self._mask([text.num_tokens for text in texts]).to(device),
            timestep=torch.stack(list(times)).to(device),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        # Further channels are the variances, which this solver does not need.
        return list(predicted[:, : len(images[0])])

    def _mask(self, num_tokens: Sequence[int]) -> Tensor:
        """Return the mask of texts of these lengths, [texts, tokens]."""
        lengths = torch.tensor(num_tokens)
        return (torch.arange(self._max_tokens) < lengths[:, None]).to(torch.int64)

    def _make_schedule(self, steps: int) -> Schedule:
        return dpm_solver.make_schedule(self._scheduler, steps)


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> PixArtSigma:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    parts = PartLoader(folder, dtype, device, report)
    scheduler = parts.load_dpm_solver()
    tokenizer = parts.load_tokenizer(T5Tokenizer, "tokenizer")
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKL, "vae")
    transformer = parts.load_network(PixArtTransformer2DModel, "transformer")
    parts.refuse_settings(transformer, "transformer", ("use_additional_conditions",))
    multiple = transformer.config.patch_size * autoencoder_kl.scale_of(vae)
    check_sizes(sizes, multiple, MAX_PATCHES, key)
    text_encoder = parts.load_text_encoder(T5EncoderModel, "text_encoder")
    return PixArtSigma(folder, tokenizer, text_encoder, transformer, vae, scheduler)
