"""Decoded media: the form in which a file reaches the layouts of the model families."""

from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from shared.protocol.multimodal import IMAGE, Modality


@dataclass(frozen=True, slots=True)
class DecodedImage:
    image: Image.Image
    """RGB, upright."""
    source_hash: str
    """Hash of the file that the image was decoded from."""
    modality: ClassVar[Modality] = IMAGE


DecodedMedia = DecodedImage
"""The union of all modalities' decoded forms; each modality adds a class of its own."""
