"""Progress of the images of one request, derived from the records in the log of its images."""

from collections.abc import Sequence

from shared.protocol.images import PaintParams
from shared.protocol.records import AnyRecord, ImageRecord, StepState


class Painting:
    """Results of earlier attempts at a request's images."""

    def __init__(self, params: PaintParams, records: Sequence[AnyRecord]) -> None:
        self._params = params
        self._states: dict[int, StepState] = {}
        self._previews: set[tuple[int, int]] = set()
        self.images: dict[int, str] = {}
        """`media:` URLs of the images in the log, by number."""
        for record in records:
            match record:
                case StepState(number=number, step=step):
                    if record.state:
                        self._states[number] = record
                    if record.preview:
                        self._previews.add((number, step))
                case ImageRecord(number=number):
                    self.images[number] = record.media

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the images that are not in the log."""
        return [number for number in range(self._params.n) if number not in self.images]

    def state_of(self, number: int) -> StepState | None:
        """Return the record of the last stored latents of an image."""
        return self._states.get(number)

    def lacks_preview(self, number: int, step: int) -> bool:
        """Return whether a preview after `step` steps is requested and not in the log."""
        return step in self._params.preview_steps() and (number, step) not in self._previews
