"""Vocoder thread: computes the chunks of several requests, batch by batch."""

from collections.abc import Sequence

from shared.helpers.batch_thread import Pending
from workers.generator.core.schedule import Window
from workers.generator.core.units import Unit
from workers.generator.core.vocoder import ONE_SPEAKER, Codes, Samples, Speaker, Vocoder, cut
from workers.generator.unit_thread import UnitThread

Item = tuple[Codes, Window, Speaker]
"""All frames of a request so far, the window of its next chunk, and the speaker."""


class VocoderThread(UnitThread[Item, Samples]):
    def __init__(self, vocoder: Vocoder, max_batch: int) -> None:
        super().__init__("vocoder", max_batch)
        self._vocoder = vocoder

    async def speak(
        self,
        request_id: str,
        codes: Codes,
        window: Window,
        dry_at_s: float,
        speaker: Speaker = ONE_SPEAKER,
    ) -> Samples:
        """Return the samples of a chunk; `codes` are all frames of its request so far.

        Raises RequestEnded after `cancel`, and an error of the vocoder only for the chunk that
        causes it.
        """
        pending: Pending[Item, Samples] = Pending((codes, window, speaker))
        shape = (*window.shape, speaker.voice)
        return await self._compute_unit(Unit(request_id, shape, dry_at_s, pending))

    def _compute(self, items: Sequence[Item]) -> list[Samples]:
        chunks = [cut(self._vocoder, *item) for item in items]
        return self._vocoder.synthesize(chunks)
