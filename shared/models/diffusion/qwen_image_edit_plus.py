"""Qwen-Image-Edit-Plus: up to three images are edited by a text."""

from shared.models.diffusion.qwen_image import FAMILY as QWEN_IMAGE
from shared.models.image_family import Component

FAMILY = QWEN_IMAGE._replace(
    name="qwen-image-edit-plus",
    pipeline="QwenImageEditPlusPipeline",
    components={
        **QWEN_IMAGE.components,
        "processor": Component(
            "Qwen2VLProcessor", "preprocessor_config.json", config_class="Qwen2VLImageProcessor"
        ),
    },
    input_images=3,
)
