"""Z-Image, one step at a time: each row of a batch may be at another step.

The operations have the order of `ZImagePipeline`, so that the images are the same. The time of the
transformer runs from 0 to 1, and its prediction points away from the noise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Model

from shared.codec.tensors import from_torch
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
from workers.generator.diffusion import autoencoder_kl
from workers.generator.diffusion.flow_match import FlowMatch, Levels
from workers.generator.diffusion.latents import MAX_PATCHES, SpatialLatents
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.transfers import upload, upload_states

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PATCH = 2
"""Side of a patch in latents."""
MAX_SIDE = 512
"""Positions that the published transformer has for the patches of a side."""


class ZImage(SpatialLatents):
    """The three networks of Z-Image with their tokenizer and scheduler.

    Latents are [channels, rows, columns] in float32, for networks of any dtype. The guidance is the
    scale of the pipeline: the prediction moves by it times the difference of the two predictions,
    so 0 paints without guidance.
    """

    min_guidance = no_guidance = 0.0

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
        self._flow = FlowMatch(scheduler, _levels)

    def check_text(self, text: str, field: str) -> int:
        return check_num_tokens(len(self._tokenize(text)), self._max_tokens, field)

    def begin(self, size: Size, noise: Noise) -> Progress:
        return Progress(from_torch(torch.from_numpy(noise).to(torch.float32)), {})

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [s.latents for s in upload_states(steps, self._transformer.device)]
        num_patches = images[0][0].numel() // PATCH**2
        times = self._flow.times(steps, num_patches)
        # As in the pipeline, texts to guide away from are further rows of the same call.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        rows = [*range(len(steps)), *guided]
        texts = [*(step.prompt for step in steps), *guided.values()]
        predictions = self._predict([images[n] for n in rows], times[rows], texts)
        for n, negative in zip(guided, predictions[len(steps) :], strict=True):
            predictions[n] = predictions[n] + steps[n].guidance * (predictions[n] - negative)
        velocities = [-prediction for prediction in predictions[: len(steps)]]
        return self._flow.move(steps, num_patches, images, velocities)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(TEMPLATE.format(text)).ids
        return token_ids

    def _encode(self, text: str) -> Condition:
        token_ids = torch.tensor([self._tokenize(text)], device=self._text_encoder.device)
        num_tokens = token_ids.shape[1]
        # Padded as in the pipeline, or the last bits would differ.
        padding = (0, self._max_tokens - num_tokens)
        states = self._text_encoder(
            input_ids=torch.nn.functional.pad(token_ids, padding),
            attention_mask=torch.nn.functional.pad(torch.ones_like(token_ids), padding).bool(),
            output_hidden_states=True,
        ).hidden_states[-2]
        return Condition({"prompt": from_torch(states[0, :num_tokens])}, num_tokens)

    def _predict(
        self, images: Sequence[Tensor], times: Tensor, texts: Sequence[Condition]
    ) -> list[Tensor]:
        """Return the prediction for each image with its text at its time, of the image's shape."""
        device, dtype = self._transformer.device, self._transformer.dtype
        prompts = upload([text.arrays["prompt"] for text in texts], device)
        predicted = self._transformer(
            [image.to(dtype)[:, None] for image in images],
            ((1000 - times) / 1000).to(device),
            [prompt.to(dtype) for prompt in prompts],
            return_dict=False,
        )[0]
        return [prediction.float()[:, 0] for prediction in predicted]


def _levels(steps: int) -> Levels:
    """Return the pipeline's levels, which differ in the last bits from `linear_levels`."""
    return torch.linspace(1.0, 1 / steps, steps).numpy()


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> ZImage:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    parts = PartLoader(folder, dtype, device, report)
    scheduler = parts.load_flow_match()
    tokenizer = parts.load_tokenizer(Qwen2Tokenizer, "tokenizer")
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKL, "vae")
    check_sizes(sizes, PATCH * autoencoder_kl.scale_of(vae), MAX_PATCHES, key, MAX_SIDE)
    text_encoder = parts.load_text_encoder(Qwen3Model, "text_encoder")
    transformer = parts.load_network(ZImageTransformer2DModel, "transformer")
    return ZImage(folder, tokenizer, text_encoder, transformer, vae, scheduler)
