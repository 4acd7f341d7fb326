"""Qwen-Image-Edit-Plus: edits by several images, with numbers that a prompt may name.

The operations have the order of `QwenImageEditPlusPipeline`, so that the images are the same.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from shared.models.image_folder import ImageFolder
from workers.generator.diffusion.qwen_image import OTHER_INPUTS
from workers.generator.diffusion.qwen_image_edit import IMAGE_MARK, QwenImageEdit, load_as

# The transformer computes this one alone: the images to edit then have no noise for it.
REFUSED = [setting for setting in OTHER_INPUTS if setting != "zero_cond_t"]


class QwenImageEditPlus(QwenImageEdit):
    """The networks of Qwen-Image-Edit-Plus with their processor."""

    text_area: ClassVar = 384 * 384

    def marks(self, num_images: int) -> str:
        return "".join(f"Picture {number}: {IMAGE_MARK}" for number in range(1, num_images + 1))


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> QwenImageEditPlus:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    return load_as(QwenImageEditPlus, folder, dtype, device, sizes, key, report, REFUSED)
