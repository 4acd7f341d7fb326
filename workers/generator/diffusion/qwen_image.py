"""Qwen-Image, one step at a time: each row of a batch may be at another step.

The operations have the order of `QwenImagePipeline`, so that the images are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.models.image_family import ImageFamily
from shared.models.image_folder import ImageFolder
from workers.generator.core.denoising import (
    Condition,
    Size,
    Step,
    Stepped,
    check_num_tokens,
    check_sizes,
)
from workers.generator.diffusion.flow_match import FlowMatch, linear_levels
from workers.generator.diffusion.latents import MAX_PATCHES, PackedLatents
from workers.generator.diffusion.packing import PATCH, unpack
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.pixels import decode_latents, denormalized, to_unit
from workers.generator.diffusion.transfers import upload, upload_states

TEMPLATE = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
INSTRUCTION = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:"
)
# Settings of the transformer that change its inputs, as in models that edit images.
OTHER_INPUTS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
INPUT = "input"
"""Name of the packed latents of the images to edit."""


class Networks(NamedTuple):
    """The three networks of Qwen-Image and their scheduler."""

    text_encoder: Any
    transformer: Any
    vae: Any
    scheduler: Any


class QwenImage(PackedLatents):
    """The networks of Qwen-Image with their tokenizer.

    Latents are packed: [patches, channels], where a patch is 2x2 latents.
    """

    min_guidance = no_guidance = 1.0
    instruction: ClassVar = INSTRUCTION
    num_template_tokens: ClassVar = 34
    """Tokens before the text. The network does not read their states."""

    def __init__(self, family: ImageFamily, tokenizer: Any, networks: Networks) -> None:
        super().__init__(networks.transformer, networks.vae, _multiple_of(networks.vae))
        self.empty_negative = family.empty_negative
        self._max_tokens = family.max_prompt_tokens
        self._tokenizer = tokenizer
        self._text_encoder = networks.text_encoder
        self._flow = FlowMatch(networks.scheduler, linear_levels)

    def check_text(self, text: str, field: str) -> int:
        num_tokens = len(self._tokenize(text)) - self.num_template_tokens
        return check_num_tokens(num_tokens, self._max_tokens, field)

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [s.latents for s in upload_states(steps, self._transformer.device)]
        num_patches = len(images[0])
        times = self._flow.times(steps, num_patches)
        velocities = self._predict(steps[0].size, images, times, [step.prompt for step in steps])
        # As in the pipeline, texts to guide away from have a second call: then an image that is
        # alone in its batch has the pipeline's last bits in every dtype.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        if guided:
            negatives = self._predict(
                steps[0].size,
                [images[n] for n in guided],
                times[list(guided)],
                list(guided.values()),
            )
            for n, negative in zip(guided, negatives, strict=True):
                velocities[n] = _guided(velocities[n], negative, steps[n].guidance)
        return self._flow.move(steps, num_patches, images, velocities)

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        unpacked = unpack(to_torch(latents), *self._grid(size))
        image = unpacked[None, :, None].to(self._vae.device, self._vae.dtype)
        decoded = decode_latents(self._vae, denormalized(image, self._vae.config), size)[0, :, 0]
        return to_unit(decoded, self._transformer.dtype)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(TEMPLATE.format(self.instruction, text)).ids
        return token_ids

    def _encode(self, text: str) -> Condition:
        states = self._states(self._tokenize(text))
        return Condition({"prompt": from_torch(states)}, len(states))

    def _states(self, token_ids: Sequence[int], **images: Tensor) -> Tensor:
        """Return the states of a text, [tokens, width], without the tokens before it."""
        ids = torch.tensor([token_ids], device=self._text_encoder.device)
        # A mask of ones, because without one transformers reuses positions of the last text.
        states: Tensor = self._text_encoder.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **images
        ).last_hidden_state
        return states[0, self.num_template_tokens :]

    def _predict(
        self,
        size: Size,
        images: Sequence[Tensor],
        times: Tensor,
        texts: Sequence[Condition],
    ) -> list[Tensor]:
        """Return the velocity of each image, [patches, channels], with its text at its time.

        Images to edit are in the same sequence, after the image. They have the same sizes in all
        texts.
        """
        prompts, mask = self._padded(texts)
        sequence, grids = torch.stack(list(images)), [self._grid(size)]
        if texts[0].image_sizes:
            inputs = upload([text.arrays[INPUT] for text in texts], sequence.device)
            sequence = torch.cat([sequence, torch.stack(inputs).to(sequence)], dim=1)
            grids += [self._grid(image_size) for image_size in texts[0].image_sizes]
        predicted = self._transformer(
            hidden_states=sequence,
            timestep=times.to(prompts) / 1000,
            encoder_hidden_states=prompts,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *grid) for grid in grids]] * len(images),
            return_dict=False,
        )[0]
        return list(predicted[:, : len(images[0])])

    def _padded(self, texts: Sequence[Condition]) -> tuple[Tensor, Tensor | None]:
        """Return texts as [texts, tokens, width], and the mask of their tokens if some are shorter.

        The pipeline has no mask for a text that is alone.
        """
        prompts = [to_torch(text.arrays["prompt"]) for text in texts]
        device, dtype = self._transformer.device, self._transformer.dtype
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device, dtype)
        lengths = torch.tensor([text.num_tokens for text in texts])
        # Compared on the CPU, so that the step does not wait for the device.
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return padded, None if mask.all() else mask.to(device)


def _guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Return the guided prediction, which has the norm of the one with the prompt."""
    combined = negative + scale * (positive - negative)
    norms = [torch.norm(value, dim=-1, keepdim=True) for value in (positive, combined)]
    guided: Tensor = combined * (norms[0] / norms[1])
    return guided


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
    parts = PartLoader(folder, dtype, device, report)
    tokenizer = parts.load_tokenizer(Qwen2Tokenizer, "tokenizer")
    networks = load_networks(parts, sizes, key, without=("model.visual", "lm_head"))
    return QwenImage(folder.family, tokenizer, networks)


def load_networks(
    parts: PartLoader,
    sizes: Sequence[str],
    key: str,
    *,
    without: Sequence[str],
    refused: Sequence[str] = OTHER_INPUTS,
) -> Networks:
    """Load the networks for these sizes, `without` submodules of the text encoder.

    Raises ConfigError, also for a transformer with one of the `refused` settings.
    """
    scheduler = parts.load_flow_match()
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKLQwenImage, "vae")
    check_sizes(sizes, _multiple_of(vae), MAX_PATCHES, key)
    text_encoder = parts.load_text_encoder(
        Qwen2_5_VLForConditionalGeneration, "text_encoder", without=without
    )
    transformer = parts.load_network(QwenImageTransformer2DModel, "transformer")
    parts.refuse_settings(transformer, "transformer", refused)
    return Networks(text_encoder, transformer, vae, scheduler)


def _multiple_of(vae: Any) -> int:
    """Return the side of a patch in pixels."""
    num_halvings = len(vae.temperal_downsample)
    return PATCH << num_halvings
