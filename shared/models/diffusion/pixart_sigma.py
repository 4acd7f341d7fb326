"""PixArt-Sigma: images from a text, by a transformer over patches that reads T5's states."""

from shared.models.image_family import Component, ImageFamily

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
    steps=20,
    guidance=4.5,
    empty_negative="",
    max_prompt_tokens=300,
)
