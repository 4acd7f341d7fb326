"""FLUX.1 [schnell]: images from a text in four steps, without guidance."""

from shared.models.diffusion import flux

FAMILY = flux.FAMILY._replace(
    name="flux.1-schnell",
    without=("transformer", "guidance_embeds"),
    module="flux",
    # The card has these numbers.
    steps=4,
    guidance=0.0,
    max_prompt_tokens=256,
)
