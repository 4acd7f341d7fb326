"""Qwen-Image: images from a text, by a transformer over the tokens of a text and patches."""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule

FAMILY = ImageFamily(
    name="qwen-image",
    pipeline="QwenImagePipeline",
    components={
        "scheduler": Component("FlowMatchEulerDiscreteScheduler", "scheduler_config.json"),
        "text_encoder": Component("Qwen2_5_VLForConditionalGeneration", weights="model"),
        "tokenizer": Component("Qwen2Tokenizer", "tokenizer_config.json"),
        "transformer": Component("QwenImageTransformer2DModel", weights="diffusion_pytorch_model"),
        "vae": Component("AutoencoderKLQwenImage", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    # The model's card has the first seven sizes. The last one is the pipeline's default.
    sizes=(
        "1328x1328",
        "1664x928",
        "928x1664",
        "1472x1104",
        "1104x1472",
        "1584x1056",
        "1056x1584",
        "1024x1024",
    ),
    size_rule=SizeRule(16, 2048 * 2048, 4096),
    steps=50,
    guidance=4.0,
    # In diffusers, guidance has no effect without a negative prompt.
    empty_negative=" ",
    max_prompt_tokens=1024,
    fits=(
        Fit("joint_attention_dim", (("text_encoder", "hidden_size"),)),
        # Patches of four latents.
        Fit("in_channels", (("vae", "z_dim"),), 4),
    ),
)
