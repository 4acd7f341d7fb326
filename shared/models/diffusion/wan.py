"""Wan: videos from a text, by a transformer over patches in space and time.

Wan 2.2 has two transformers, which take turns: the second one computes the steps with less noise.
"""

from shared.models.image_family import Component, Fit, ImageFamily
from shared.protocol.images import SizeRule
from shared.protocol.videos import VideoSpec

FAMILY = ImageFamily(
    name="wan",
    pipeline="WanPipeline",
    components={
        "scheduler": Component("UniPCMultistepScheduler", "scheduler_config.json"),
        "text_encoder": Component("UMT5EncoderModel", weights="model"),
        "tokenizer": Component("T5Tokenizer", "tokenizer_config.json"),
        "transformer": Component("WanTransformer3DModel", weights="diffusion_pytorch_model"),
        "transformer_2": Component(
            "WanTransformer3DModel", weights="diffusion_pytorch_model", is_optional=True
        ),
        "vae": Component("AutoencoderKLWan", weights="diffusion_pytorch_model"),
    },
    float32=frozenset({"vae"}),
    # The first one is the pipeline's default. The larger ones need a model with 14 B parameters.
    sizes=("832x480", "480x832", "1280x720", "720x1280", "960x960", "624x624"),
    size_rule=SizeRule(16, 1280 * 720, 1280),
    steps=50,
    guidance=5.0,
    empty_negative="",
    max_prompt_tokens=512,
    # Wan is trained with 81 frames, which are 5 seconds.
    video=VideoSpec(frames=81, fps=16, multiple=4, max_frames=161),
    fits=(
        Fit("text_dim", (("text_encoder", "d_model"),)),
        Fit("in_channels", (("vae", "z_dim"),)),
    ),
)
