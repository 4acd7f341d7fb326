"""Stable Diffusion 3, one step at a time: each row of a batch may be at another step.

The operations have the order of `StableDiffusion3Pipeline`, so that the images are the same. T5
reads the whole text, and both networks of CLIP its first 77 tokens: the networks were trained so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer
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
from workers.generator.diffusion import autoencoder_kl
from workers.generator.diffusion.flow_match import FlowMatch
from workers.generator.diffusion.latents import MAX_PATCHES, SpatialLatents
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.text_encoders import TextEncoder
from workers.generator.diffusion.transfers import upload_states

T5 = "text_encoder_3"


class StableDiffusion3(SpatialLatents):
    """The networks of Stable Diffusion 3 with their tokenizers and scheduler.

    Latents are [channels, rows, columns]. Without T5, its states are zeros, and texts are as long
    as CLIP reads them.
    """

    min_guidance = no_guidance = 1.0

    def __init__(
        self,
        folder: ImageFolder,
        clips: Sequence[TextEncoder],
        t5: TextEncoder | None,
        transformer: Any,
        vae: Any,
        scheduler: Any,
    ) -> None:
        super().__init__(transformer, vae)
        self.empty_negative = folder.family.empty_negative
        self._t5_len = folder.family.max_prompt_tokens
        self._clips, self._t5 = clips, t5
        self._flow = FlowMatch(scheduler, lambda steps: None)

    def check_text(self, text: str, field: str) -> int:
        tokenizer = (self._t5 or self._clips[0]).tokenizer
        return check_num_tokens(tokenizer.count(text), tokenizer.length, field)

    def begin(self, size: Size, noise: Noise) -> Progress:
        return Progress(from_torch(torch.from_numpy(noise).to(self._transformer.dtype)), {})

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [s.latents for s in upload_states(steps, self._transformer.device)]
        num_patches = images[0][0].numel() // self._transformer.config.patch_size**2
        # As in the pipeline, texts to guide away from are the first rows of the same call.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        rows = [*guided, *range(len(steps))]
        texts = [*guided.values(), *(step.prompt for step in steps)]
        times = self._flow.times(steps, num_patches)[rows]
        predictions = self._predict([images[n] for n in rows], times, texts)
        velocities = predictions[len(guided) :]
        for n, negative in zip(guided, predictions, strict=False):
            velocities[n] = negative + steps[n].guidance * (velocities[n] - negative)
        return self._flow.move(steps, num_patches, images, velocities)

    def _encode(self, text: str) -> Condition:
        """Return the states of all encoders, one after another, and the pooled outputs of CLIP."""
        outputs = [clip.encode(text, hidden_states=True) for clip in self._clips]
        states = torch.cat([output.hidden_states[-2][0] for output in outputs], dim=-1)
        pooled = torch.cat([output.text_embeds[0] for output in outputs], dim=-1)
        if self._t5 is None:
            width = self._transformer.config.joint_attention_dim
            t5_states = states.new_zeros(self._t5_len, width)
        else:
            t5_states = self._t5.encode(text).last_hidden_state[0]
        padding = (0, t5_states.shape[-1] - states.shape[-1])
        prompt = torch.cat([torch.nn.functional.pad(states, padding), t5_states])
        return Condition({"prompt": from_torch(prompt), "pooled": from_torch(pooled)}, len(prompt))

    def _predict(
        self, images: Sequence[Tensor], times: Tensor, texts: Sequence[Condition]
    ) -> list[Tensor]:
        """Return the velocity of each image with its text at its time, of the image's shape."""
        prompts, pooled = (
            torch.stack([to_torch(text.arrays[name]) for text in texts]).to(images[0])
            for name in ("prompt", "pooled")
        )
        predicted = self._transformer(
            hidden_states=torch.stack(list(images)),
            timestep=times.to(prompts.device),
            encoder_hidden_states=prompts,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return list(predicted)


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> StableDiffusion3:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    parts = PartLoader(folder, dtype, device, report)
    scheduler = parts.load_flow_match()
    has_t5, length = T5 in folder.parts, folder.family.max_prompt_tokens
    words = [
        parts.load_fixed_tokenizer(CLIPTokenizer, name) for name in ("tokenizer", "tokenizer_2")
    ]
    pieces = parts.load_fixed_tokenizer(T5Tokenizer, "tokenizer_3", length) if has_t5 else None
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKL, "vae")
    settings = parts.read_settings(SD3Transformer2DModel, "transformer")
    multiple = settings["patch_size"] * autoencoder_kl.scale_of(vae)
    check_sizes(sizes, multiple, MAX_PATCHES, key, settings["pos_embed_max_size"])
    clips = [
        TextEncoder(tokenizer, parts.load_text_encoder(CLIPTextModelWithProjection, name))
        for tokenizer, name in zip(words, ("text_encoder", "text_encoder_2"), strict=True)
    ]
    t5 = TextEncoder(pieces, parts.load_text_encoder(T5EncoderModel, T5)) if pieces else None
    transformer = parts.load_network(SD3Transformer2DModel, "transformer")
    return StableDiffusion3(folder, clips, t5, transformer, vae, scheduler)
