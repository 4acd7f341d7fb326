"""Bugs of painted images: their steps, their checkpoints, and the results that requests share."""

from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap


@bug("dit", "dying painters", "I3")
def checkpoint_before_the_step() -> None:
    """A record says that a step is done, and names the latents from before it."""
    from shared.codec.envelope import TensorData
    from workers.generator import image_worker
    from workers.generator.core.denoising import Condition, Progress, Stepped
    from workers.generator.image_worker import ImageWorker

    before: dict[tuple[str, int], Progress] = {}
    compute, note = ImageWorker._step, ImageWorker._note

    async def step(
        self: ImageWorker,
        request: "image_worker._Open",
        number: int,
        progress: Progress,
        step: int,
        texts: list[Condition],
    ) -> Stepped:
        before[request.header.request_id, number] = progress
        return await compute(self, request, number, progress, step, texts)

    async def stale(
        self: ImageWorker,
        request: "image_worker._Open",
        number: int,
        step: int,
        *,
        state: Progress | None = None,
        preview: TensorData | None = None,
    ) -> None:
        if state is not None:
            state = before[request.header.request_id, number]
        await note(self, request, number, step, state=state, preview=preview)

    replace_attribute(ImageWorker, "_step", step)
    replace_attribute(ImageWorker, "_note", stale)


@bug("dit", "images as answers", "I3")
def results_shared_between_seeds() -> None:
    from msgspec.structs import replace

    from shared.protocol.task_messages import TaskHeader
    from workers.generator import image_worker
    from workers.generator.image_results import key_of

    def key_without_seed(model: str, header: TaskHeader, prompt: str) -> str | None:
        image = header.image
        assert image is not None
        return key_of(model, replace(header, image=replace(image, seed=0)), prompt)

    replace_attribute(image_worker, "key_of", key_without_seed)


@bug("dit", "dying painters", "I2")
def images_painted_again_on_resume() -> None:
    from shared.protocol.images import PaintParams
    from workers.generator.core.painting import Painting

    @wrap(Painting, "__init__")
    def forgetful(begin: Any, self: Painting, params: PaintParams, records: Any) -> None:
        begin(self, params, [])
