"""Progress of the images or the video of one request: records in their log, and stored states.

A stored state is an envelope with the latents, the tensors of the solver and the number of
completed steps.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from shared.codec import envelope
from shared.errors import DecodeError, UnsupportedVersion
from shared.protocol.images import PaintParams
from shared.protocol.records import AnyRecord, ImageRecord, StepState, VideoRecord
from workers.generator.core.denoising import Progress


class Painting:
    """Results of earlier attempts at a request's images."""

    def __init__(self, params: PaintParams, records: Sequence[AnyRecord]) -> None:
        self._params = params
        self._states: dict[int, StepState] = {}
        self._num_states: Counter[int] = Counter()
        self._previews: set[tuple[int, int]] = set()
        self.images: dict[int, str] = {}
        """`media:` URLs of the images in the log, by number; a video has the number 0."""
        for record in records:
            match record:
                case StepState(number=number, step=step):
                    if record.state:
                        self._states[number] = record
                        self._num_states[number] += 1
                    if record.preview:
                        self._previews.add((number, step))
                case ImageRecord(number=number):
                    self.images[number] = record.media
                case VideoRecord():
                    self.images[0] = record.media

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the images that are not in the log."""
        return [number for number in range(self._params.n) if number not in self.images]

    def state_of(self, number: int) -> StepState | None:
        """Return the record of the last stored latents of an image."""
        return self._states.get(number)

    def next_place(self, number: int) -> int:
        """Return the place of the next state of an image. The last one is in the other place."""
        return self._num_states[number] % 2

    def count_state(self, number: int) -> None:
        """Count a state of an image that was appended to the log."""
        self._num_states[number] += 1

    def lacks_preview(self, number: int, step: int) -> bool:
        """Return whether a preview after `step` steps is requested and not in the log."""
        return step in self._params.preview_steps() and (number, step) not in self._previews


class _StateHead(Struct, frozen=True):
    step: int
    """Number of completed steps."""
    solver: tuple[str, ...]
    """Names of the solver's tensors, which follow the latents."""


def encode_state(progress: Progress, step: int) -> bytes:
    """Return the stored state of an image after `step` steps."""
    head = _StateHead(step, tuple(progress.solver))
    return envelope.encode(head, [progress.latents, *progress.solver.values()])


def decode_state(data: bytes, step: int, initial: Progress) -> Progress | None:
    """Return the progress in a state that was stored after `step` steps.

    Returns None for a state of another model, dtype or version than `initial`, the image before its
    first step.
    """
    try:
        head, tensors = envelope.decode(data, _StateHead)
    except (DecodeError, UnsupportedVersion):
        return None
    if head.step != step or len(tensors) != 1 + len(head.solver):
        return None
    latents, *solver = tensors
    progress = Progress(latents, dict(zip(head.solver, solver, strict=True)))
    return progress if _form(progress) == _form(initial) else None


def _form(progress: Progress) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the names, dtypes and shapes of all tensors."""
    tensors = [("", progress.latents), *sorted(progress.solver.items())]
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors]
