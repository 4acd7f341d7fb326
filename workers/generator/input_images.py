"""Images to edit, read from the stream of media files."""

import asyncio
from collections.abc import Sequence

import numpy as np

from shared.bus.bus import Bus
from shared.config.schema import RendererConfig
from shared.decoding.image_reader import read_image
from shared.state import media_store
from workers.generator.core.denoising import EditModel, ImageModel, InputImage, Pixels


class InputImages:
    """Reader of the images that requests give to a model that edits."""

    def __init__(self, bus: Bus, limits: RendererConfig, model: ImageModel) -> None:
        self._bus, self._limits, self._model = bus, limits, model
        self._decoding = asyncio.Lock()

    async def read(self, urls: Sequence[str], tenant: str) -> tuple[InputImage, ...]:
        """Return the images of `media:` URLs.

        Raises InvalidMedia, MediaNotFound or MediaTooLarge, which name the field of the request.
        """
        if not urls:
            return ()
        model, limits = self._model, self._limits
        assert isinstance(model, EditModel)
        images = []
        for number, url in enumerate(urls):
            field = f"image.input_images[{number}]"
            data = await media_store.read_stored(
                self._bus, url, field, limits.max_image_bytes, tenant
            )
            # Decoded files are large, so there is one at a time.
            async with self._decoding:
                pixels = await asyncio.to_thread(read_pixels, data, limits, field)
                images.append(await asyncio.to_thread(model.read_image, pixels, field))
        return tuple(images)


def read_pixels(data: bytes, limits: RendererConfig, field: str) -> Pixels:
    """Return the upright pixels of an image's file, as `load_image` of diffusers returns them.

    Transparency is dropped. Raises InvalidMedia and MediaTooLarge.
    """
    return np.asarray(read_image(data, limits, field, lambda image: image.convert("RGB")))
