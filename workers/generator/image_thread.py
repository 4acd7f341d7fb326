"""Image thread: encodes texts, computes denoising steps, and decodes images, batch by batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.codec.envelope import TensorData
from shared.helpers.batch_thread import Pending
from shared.helpers.lru import ByteLRU
from shared.protocol.encoding import to_msgpack
from workers.generator.core.denoising import (
    Condition,
    EditModel,
    ImageModel,
    InputImage,
    Pixels,
    Size,
    Step,
    Stepped,
)
from workers.generator.core.units import Unit
from workers.generator.unit_thread import UnitThread

TEXT_CACHE_BYTES = 256 * 2**20
"""Size of the cache of encoded texts: some hundreds, for the widest text encoders in use."""
ENCODE_LEAD_S = 5e8
"""Lead of texts over steps: the images of an encoded text can join the batches of others. It is
less than the lag of the batch lane, whose texts do not delay interactive steps."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Work of encoding the texts of one request."""

    texts: tuple[str, ...]
    scope: str
    """Scope of caches: a tenant cannot find out the texts of others by the time that they take."""
    urls: tuple[str, ...] = ()
    """`media:` URLs of the images to edit, which name their contents."""
    images: tuple[InputImage, ...] = ()
    """The images to edit."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Work of decoding the latents of one image."""

    latents: TensorData
    size: Size


Work = Encode | Step | Decode
UnitResult = list[Condition] | Stepped | Pixels


class ImageThread(UnitThread[Work, UnitResult]):
    """Thread with three kinds of units. Steps of equal shapes share batches, and so do texts.

    All methods raise RequestEnded after `cancel`, and an error of the model only for the request
    that causes it.
    """

    def __init__(self, model: ImageModel, max_batch: int) -> None:
        super().__init__("painter", max_batch)
        self._model = model
        self._texts: ByteLRU[str, Condition] = ByteLRU(TEXT_CACHE_BYTES)
        self.num_steps = 0
        """Number of completed steps of all images."""

    async def encode(self, request_id: str, encode: Encode, due_s: float) -> list[Condition]:
        """Return the encoded texts of a request, which may be cached."""
        work: Pending[Work, UnitResult] = Pending(encode)
        unit = Unit(request_id, ("encode",), due_s - ENCODE_LEAD_S, work)
        conditions = await self._compute_unit(unit)
        assert isinstance(conditions, list)
        return conditions

    async def step(self, request_id: str, number: int, step: Step, due_s: float) -> Stepped:
        """Return the result of a step of image `number` of a request."""
        work: Pending[Work, UnitResult] = Pending(step)
        # Packed latents of 64x32 and 32x64 pixels have one shape, but not the same positions.
        shape = ("step", step.progress.latents.shape, step.size, step.prompt.image_sizes)
        stepped = await self._compute_unit(Unit(request_id, shape, due_s, work, number))
        assert isinstance(stepped, Stepped)
        return stepped

    async def decode(
        self, request_id: str, number: int, latents: TensorData, size: Size, due_s: float
    ) -> Pixels:
        """Return the pixels of image `number` of a request."""
        work: Pending[Work, UnitResult] = Pending(Decode(latents, size))
        # An image is decoded alone, because a decoder needs much memory.
        shape = ("decode", latents.shape, request_id, number)
        pixels = await self._compute_unit(Unit(request_id, shape, due_s, work, number))
        assert isinstance(pixels, np.ndarray)
        return pixels

    def _compute(self, items: Sequence[Work]) -> Sequence[UnitResult]:
        steps = [item for item in items if isinstance(item, Step)]
        if not steps:
            return [self._compute_alone(item) for item in items]
        results = self._model.step(steps)
        self.num_steps += len(steps)
        return results

    def _compute_alone(self, item: Work) -> UnitResult:
        if isinstance(item, Encode):
            return self._encode(item)
        assert isinstance(item, Decode)
        return self._model.pixels(item.latents, item.size)

    def _encode(self, work: Encode) -> list[Condition]:
        keys = [text_key(text, work.scope, work.urls) for text in work.texts]
        conditions = {key: self._texts.get(key) for key in keys}
        missing = {
            key: text for key, text in zip(keys, work.texts, strict=True) if conditions[key] is None
        }
        if missing:
            encoded = self._encode_texts([*missing.values()], work.images)
            conditions.update(zip(missing, encoded, strict=True))
        results = [condition for key in keys if (condition := conditions[key]) is not None]
        for key, condition in zip(keys, results, strict=True):
            self._texts.put(key, condition, condition.num_bytes)
        return results

    def _encode_texts(self, texts: Sequence[str], images: Sequence[InputImage]) -> list[Condition]:
        if not images:
            return self._model.encode(texts)
        # Both texts of a request need its images, which are encoded once.
        assert isinstance(self._model, EditModel)
        return self._model.encode_edit(texts, images)


def text_key(text: str, scope: str, urls: Sequence[str] = ()) -> str:
    """Return the key of a text, encoded with images of these URLs, in the caches of a scope."""
    return hashlib.sha256(to_msgpack((scope, text, *urls))).hexdigest()
