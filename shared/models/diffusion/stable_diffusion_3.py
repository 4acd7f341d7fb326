"""Stable Diffusion 3 and 3.5: images from a text that three encoders read."""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule

FAMILY = ImageFamily(
    name="stable-diffusion-3",
    pipeline="StableDiffusion3Pipeline",
    components={
        "scheduler": Component("FlowMatchEulerDiscreteScheduler", "scheduler_config.json"),
        "text_encoder": Component("CLIPTextModelWithProjection", weights="model"),
        "text_encoder_2": Component("CLIPTextModelWithProjection", weights="model"),
        # The model was trained to paint without T5, too.
        "text_encoder_3": Component("T5EncoderModel", weights="model", is_optional=True),
        "tokenizer": Component("CLIPTokenizer", "tokenizer_config.json"),
        "tokenizer_2": Component("CLIPTokenizer", "tokenizer_config.json"),
        "tokenizer_3": Component("T5Tokenizer", "tokenizer_config.json", is_optional=True),
        "transformer": Component("SD3Transformer2DModel", weights="diffusion_pytorch_model"),
        "vae": Component("AutoencoderKL", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    sizes=(
        "1024x1024",
        "1344x768",
        "768x1344",
        "1216x832",
        "832x1216",
        "1152x896",
        "896x1152",
        "512x512",
    ),
    # Positions of 192 patches are stored.
    size_rule=SizeRule(16, 2048 * 2048, 3072),
    # The pipeline's defaults, which the cards of both sizes of 3 have. Folders of 3.5 have the same
    # classes: 28 steps and 3.5 for Large, 40 and 4.5 for Medium, 4 and 1 for Large Turbo.
    steps=28,
    guidance=7.0,
    empty_negative="",
    max_prompt_tokens=256,
    required=(("vae", "shift_factor"),),
    fits=(
        Fit("joint_attention_dim", (("text_encoder_3", "d_model"),)),
        Fit(
            "pooled_projection_dim",
            (("text_encoder", "projection_dim"), ("text_encoder_2", "projection_dim")),
        ),
        Fit("in_channels", (("vae", "latent_channels"),)),
    ),
)
