"""A plain loop over an image model in place of a worker, which paints one image."""

from collections.abc import Iterator

from shared.protocol.images import PaintParams, parse_size
from workers.generator.core.denoising import ImageModel, Step, Stepped, negative_of, noise_of
from workers.generator.image_parts import to_png


def paint_alone(model: ImageModel, prompt: str, params: PaintParams, number: int = 0) -> bytes:
    """Return the PNG file of image `number` of a request with a seed, painted alone."""
    *_, last = steps_alone(model, prompt, params, number)
    return to_png(model.pixels(last.progress.latents, parse_size(params.size)))


def steps_alone(
    model: ImageModel, prompt: str, params: PaintParams, number: int = 0
) -> Iterator[Stepped]:
    """Yield the result of each step of image `number` of a request with a seed, computed alone."""
    assert params.seed is not None
    size = parse_size(params.size)
    progress = model.begin(size, noise_of(params.seed, number, model.noise_shape(size)))
    text = negative_of(model, params)
    condition, *negatives = model.encode([prompt] if text is None else [prompt, text])
    negative = negatives[0] if negatives else None
    for step in range(params.steps):
        work = Step(progress, condition, negative, params.guidance, size, step, params.steps)
        (stepped,) = model.step([work])
        progress = stepped.progress
        yield stepped
