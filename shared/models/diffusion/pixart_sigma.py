"""PixArt-Sigma: images from a text, by a transformer over patches that reads T5's states."""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule

FAMILY = ImageFamily(
    name="pixart-sigma",
    pipeline="PixArtSigmaPipeline",
    components={
        "scheduler": Component("DPMSolverMultistepScheduler", "scheduler_config.json"),
        "text_encoder": Component("T5EncoderModel", weights="model"),
        "tokenizer": Component("T5Tokenizer", "tokenizer_config.json"),
        # The published folders have the name that the class had before.
        "transformer": Component(
            "PixArtTransformer2DModel",
            weights="diffusion_pytorch_model",
            also=frozenset({"Transformer2DModel"}),
        ),
        "vae": Component("AutoencoderKL", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    # Sizes of the pipeline for the model of 1024 pixels.
    sizes=(
        "1024x1024",
        "1344x768",
        "768x1344",
        "1216x832",
        "832x1216",
        "1152x896",
        "896x1152",
    ),
    size_rule=SizeRule(16, 2048 * 2048, 4096),
    steps=20,
    guidance=4.5,
    empty_negative="",
    max_prompt_tokens=300,
    fits=(
        Fit("caption_channels", (("text_encoder", "d_model"),)),
        Fit("in_channels", (("vae", "latent_channels"),)),
    ),
)
