"""Z-Image: images from a text, by a transformer over one sequence of patches and tokens."""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule

FAMILY = ImageFamily(
    name="z-image",
    pipeline="ZImagePipeline",
    components={
        "scheduler": Component("FlowMatchEulerDiscreteScheduler", "scheduler_config.json"),
        # Its folder has the language model without the head, by the name of the whole.
        "text_encoder": Component(
            "Qwen3Model", weights="model", also=frozenset({"Qwen3ForCausalLM"})
        ),
        "tokenizer": Component("Qwen2Tokenizer", "tokenizer_config.json"),
        "transformer": Component("ZImageTransformer2DModel", weights="diffusion_pytorch_model"),
        "vae": Component("AutoencoderKL", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    sizes=(
        "1024x1024",
        "1280x720",
        "720x1280",
        "1152x864",
        "864x1152",
        "1248x832",
        "832x1248",
        "512x512",
    ),
    size_rule=SizeRule(16, 2048 * 2048, 4096),
    # The card of Z-Image-Turbo has these two. Z-Image itself needs 28 to 50 steps and a guidance of
    # 3 to 5, and its folder has the same classes.
    steps=9,
    guidance=0.0,
    empty_negative="",
    # The tokens of the chat template count.
    max_prompt_tokens=512,
    required=(("vae", "shift_factor"),),
    fits=(
        Fit("cap_feat_dim", (("text_encoder", "hidden_size"),)),
        Fit("in_channels", (("vae", "latent_channels"),)),
    ),
)
