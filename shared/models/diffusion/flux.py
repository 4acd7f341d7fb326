"""FLUX.1 [dev]: images from a text, by a transformer that reads the guidance as a number."""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule

FAMILY = ImageFamily(
    name="flux.1-dev",
    pipeline="FluxPipeline",
    components={
        "scheduler": Component("FlowMatchEulerDiscreteScheduler", "scheduler_config.json"),
        "text_encoder": Component("CLIPTextModel", weights="model"),
        "text_encoder_2": Component("T5EncoderModel", weights="model"),
        "tokenizer": Component("CLIPTokenizer", "tokenizer_config.json"),
        "tokenizer_2": Component("T5Tokenizer", "tokenizer_config.json"),
        "transformer": Component("FluxTransformer2DModel", weights="diffusion_pytorch_model"),
        "vae": Component("AutoencoderKL", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    sizes=(
        "1024x1024",
        "1536x1024",
        "1024x1536",
        "1344x768",
        "768x1344",
        "1216x832",
        "832x1216",
        "512x512",
    ),
    size_rule=SizeRule(16, 2048 * 2048, 4096),
    # The card has these numbers.
    steps=50,
    guidance=3.5,
    # The transformer learned guidance from a model with two predictions, and has one itself.
    empty_negative=None,
    max_prompt_tokens=512,
    required=(("vae", "shift_factor"),),
    fits=(
        Fit("joint_attention_dim", (("text_encoder_2", "d_model"),)),
        Fit("pooled_projection_dim", (("text_encoder", "hidden_size"),)),
        # Patches of four latents.
        Fit("in_channels", (("vae", "latent_channels"),), 4),
    ),
)
