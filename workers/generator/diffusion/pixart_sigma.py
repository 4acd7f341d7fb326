"""PixArt-Sigma, one step at a time: each row of a batch may be at another step.

The operations have the order of `PixArtSigmaPipeline`, so that the images are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5EncoderModel
from transformers.models.t5.tokenization_t5 import T5Tokenizer

from shared.codec.tensors import from_torch, to_torch
from shared.models.image_folder import ImageFolder
from workers.generator.core.denoising import (
    Condition,
    Noise,
    Progress,
    Size,
    Step,
    Stepped,
    check_num_tokens,
    check_sizes,
)
from workers.generator.diffusion import autoencoder_kl, dpm_solver
from workers.generator.diffusion.dpm_solver import DpmSolver
from workers.generator.diffusion.latents import MAX_PATCHES, SpatialLatents
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.transfers import upload_states


class PixArtSigma(SpatialLatents):
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
        super().__init__(transformer, vae)
        self.empty_negative = folder.family.empty_negative
        self._max_tokens = folder.family.max_prompt_tokens
        self._tokenizer, self._text_encoder = tokenizer, text_encoder
        self._solver = DpmSolver(scheduler)

    def check_text(self, text: str, field: str) -> int:
        return check_num_tokens(self._tokenizer.count(_clean(text)), self._max_tokens, field)

    def begin(self, size: Size, noise: Noise) -> Progress:
        return dpm_solver.begin(torch.from_numpy(noise).to(self._transformer.dtype))

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        states = upload_states(steps, self._transformer.device)
        times = self._solver.times(steps)
        # As in the pipeline, texts to guide away from are the first rows of the same call.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        rows = [*guided, *range(len(steps))]
        texts = [*guided.values(), *(step.prompt for step in steps)]
        predictions = self._predict([states[n].latents for n in rows], times[rows], texts)
        negatives, positives = predictions[: len(guided)], predictions[len(guided) :]
        for n, negative in zip(guided, negatives, strict=True):
            positives[n] = negative + steps[n].guidance * (positives[n] - negative)
        return self._solver.move(steps, states, positives)

    def _encode(self, text: str) -> Condition:
        # The transformer reads texts of one length, with a mask.
        device, num_tokens = self._text_encoder.device, self._tokenizer.count(_clean(text))
        token_ids = self._tokenizer.tokenize(_clean(text), device)
        mask = self._mask([num_tokens]).to(device)
        states = self._text_encoder(token_ids, attention_mask=mask).last_hidden_state
        return Condition({"prompt": from_torch(states[0])}, num_tokens)

    def _predict(
        self, images: Sequence[Tensor], times: Tensor, texts: Sequence[Condition]
    ) -> list[Tensor]:
        """Return the prediction for each image with its text at its time, of the image's shape."""
        device, dtype = self._transformer.device, self._transformer.dtype
        prompts = torch.stack([to_torch(text.arrays["prompt"]) for text in texts])
        predicted = self._transformer(
            torch.stack(list(images)),
            encoder_hidden_states=prompts.to(device, dtype),
            encoder_attention_mask=self._mask([text.num_tokens for text in texts]).to(device),
            timestep=times.to(device),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        # Further channels are the variances, which this solver does not need.
        return list(predicted[:, : len(images[0])])

    def _mask(self, num_tokens: Sequence[int]) -> Tensor:
        """Return the mask of texts of these lengths, [texts, tokens]."""
        lengths = torch.tensor(num_tokens)
        return (torch.arange(self._max_tokens) < lengths[:, None]).to(torch.int64)


def _clean(text: str) -> str:
    return text.lower().strip()


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
    tokenizer = parts.load_fixed_tokenizer(
        T5Tokenizer, "tokenizer", folder.family.max_prompt_tokens
    )
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKL, "vae")
    parts.refuse_settings(vae, "vae", ("shift_factor",))
    patch = parts.read_settings(PixArtTransformer2DModel, "transformer")["patch_size"]
    check_sizes(sizes, patch * autoencoder_kl.scale_of(vae), MAX_PATCHES, key)
    text_encoder = parts.load_text_encoder(T5EncoderModel, "text_encoder")
    transformer = parts.load_network(PixArtTransformer2DModel, "transformer")
    parts.refuse_settings(transformer, "transformer", ("use_additional_conditions",))
    return PixArtSigma(folder, tokenizer, text_encoder, transformer, vae, scheduler)
