"""Image thread: computes denoising steps of the images of several requests, batch by batch."""

from collections.abc import Sequence

from shared.helpers.batch_thread import Pending
from workers.generator.core.denoising import ImageModel, Step, Stepped
from workers.generator.core.units import Unit
from workers.generator.unit_thread import UnitThread


class ImageThread(UnitThread[Step, Stepped]):
    def __init__(self, model: ImageModel, max_batch: int) -> None:
        super().__init__("painter", max_batch)
        self._model = model
        self.num_steps = 0
        """Number of completed steps of all images."""

    async def step(self, request_id: str, number: int, step: Step, due_s: float) -> Stepped:
        """Return the result of a step of image `number` of a request.

        Raises RequestEnded after `cancel`, and an error of the model only for the image that causes
        it.
        """
        pending: Pending[Step, Stepped] = Pending(step)
        unit = Unit(request_id, step.latents.shape, due_s, pending, number)
        return await self._compute_unit(unit)

    def _compute(self, items: Sequence[Step]) -> list[Stepped]:
        results = self._model.step(items)
        self.num_steps += len(items)
        return results
