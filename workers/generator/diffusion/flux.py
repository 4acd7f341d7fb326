"""FLUX.1, one step at a time: each row of a batch may be at another step.

The operations have the order of `FluxPipeline`, so that the images are the same. T5 reads the whole
text. CLIP, whose pooled output is a summary of the text, reads its first 77 tokens: the networks
were trained so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.models.t5.modeling_t5 import T5EncoderModel
from transformers.models.t5.tokenization_t5 import T5Tokenizer

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.models.image_folder import ImageFolder
from workers.generator.core.denoising import (
    Condition,
    Size,
    Step,
    Stepped,
    check_num_tokens,
    check_sizes,
)
from workers.generator.diffusion import autoencoder_kl
from workers.generator.diffusion.flow_match import FlowMatch, linear_levels
from workers.generator.diffusion.latents import MAX_PATCHES, PackedLatents
from workers.generator.diffusion.packing import PATCH, unpack
from workers.generator.diffusion.parts import PartLoader
from workers.generator.diffusion.pixels import to_unit
from workers.generator.diffusion.text_encoders import TextEncoder
from workers.generator.diffusion.transfers import upload_states


class Flux(PackedLatents):
    """The four networks of FLUX.1 with their tokenizers and scheduler. Latents are packed.

    The guidance is the number that the transformer reads, which is `guidance_scale` in the
    pipeline. Transformers without this input paint without guidance. No other guidance is
    implemented, so there are no negative prompts: the pipeline's `true_cfg_scale` would need a
    second scale in each request, and doubles the work.
    """

    empty_negative = None
    min_guidance = 0.0

    def __init__(
        self,
        folder: ImageFolder,
        clip: TextEncoder,
        t5: TextEncoder,
        transformer: Any,
        vae: Any,
        scheduler: Any,
    ) -> None:
        super().__init__(transformer, vae, PATCH * autoencoder_kl.scale_of(vae))
        self._clip, self._t5 = clip, t5
        self._flow = FlowMatch(scheduler, linear_levels)
        self.no_guidance = None if transformer.config.guidance_embeds else 0.0

    def check_text(self, text: str, field: str) -> int:
        tokenizer = self._t5.tokenizer
        return check_num_tokens(tokenizer.count(text), tokenizer.length, field)

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        images = [s.latents for s in upload_states(steps, self._transformer.device)]
        num_patches = len(images[0])
        states, pooled = (
            torch.stack([to_torch(step.prompt.arrays[name]) for step in steps]).to(images[0])
            for name in ("prompt", "pooled")
        )
        guidance = torch.tensor([step.guidance for step in steps], device=states.device)
        velocities = self._transformer(
            hidden_states=torch.stack(images),
            timestep=self._flow.times(steps, num_patches).to(states) / 1000,
            guidance=guidance if self.no_guidance is None else None,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3, device=states.device),
            img_ids=self._positions(steps[0].size).to(states.device),
            return_dict=False,
        )[0]
        return self._flow.move(steps, num_patches, images, list(velocities))

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        unpacked = unpack(to_torch(latents), *self._grid(size))
        return to_unit(autoencoder_kl.decode(self._vae, unpacked, size), self._transformer.dtype)

    def _encode(self, text: str) -> Condition:
        pooled = self._clip.encode(text).pooler_output[0]
        states = self._t5.encode(text).last_hidden_state[0]
        return Condition({"prompt": from_torch(states), "pooled": from_torch(pooled)}, len(states))

    def _positions(self, size: Size) -> Tensor:
        """Return the positions of patches, [patches, 3]: 0, row and column."""
        rows, columns = self._grid(size)
        row, column = torch.arange(rows), torch.arange(columns)
        return torch.cartesian_prod(torch.zeros(1), row.float(), column.float())


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> Flux:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    parts = PartLoader(folder, dtype, device, report)
    scheduler = parts.load_flow_match()
    words = parts.load_fixed_tokenizer(CLIPTokenizer, "tokenizer")
    length = folder.family.max_prompt_tokens
    pieces = parts.load_fixed_tokenizer(T5Tokenizer, "tokenizer_2", length)
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKL, "vae")
    check_sizes(sizes, PATCH * autoencoder_kl.scale_of(vae), MAX_PATCHES, key)
    clip = TextEncoder(words, parts.load_text_encoder(CLIPTextModel, "text_encoder"))
    t5 = TextEncoder(pieces, parts.load_text_encoder(T5EncoderModel, "text_encoder_2"))
    transformer = parts.load_network(FluxTransformer2DModel, "transformer")
    return Flux(folder, clip, t5, transformer, vae, scheduler)
