"""The part of the configuration about generators, which compute sound and images."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class GeneratorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The generator: batches and limits."""

    max_batch: Positive = 1
    """Limit on the chunks of one batch, which are of different requests. A table's vocoder takes as
    long for each chunk of a batch as for one alone, so the first ones would only come later."""
    max_images: Positive = 8
    """Limit on the images of one batch, each of which may be at another step. With guidance, an
    image takes two rows of the batch."""
    checkpoint_s: Annotated[float, Meta(ge=0)] = 5.0
    """An image is stored after so much time of computing, so that another worker goes on there; 0
    stores it after each step."""
    result_ttl_s: Annotated[float, Meta(ge=0)] = 600.0
    """Time for which the images of a request with a seed answer equal requests of the same tenant,
    which are not painted again; 0 for none. Equal requests at the same time are painted once."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads of a stage that paints; 0 leaves it to torch."""
    max_tasks: Positive = 64
    """Limit on tasks in flight, most of which wait for the stage before."""
    step_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """A batch that takes longer counts as hung, and the process ends."""
