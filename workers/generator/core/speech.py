"""State of one request: the frames that are there, the chunks that are made, the client's clock."""

import numpy as np

from shared.errors import PagemillError
from shared.protocol.chunks import ChunkSpec, interpolate
from shared.protocol.records import AnyRecord, AudioChunk, CodeChunk
from workers.generator.core.schedule import Window, window_at
from workers.generator.core.vocoder import Codes, Vocoder


class Speech:
    """Collects the frames of one speech, and says which chunk is next.

    Where a chunk begins is known from the samples in the log, so nothing else has to be kept for
    another attempt.
    """

    def __init__(self, spec: ChunkSpec, vocoder: Vocoder, records: list[AnyRecord]) -> None:
        """`records` are those of the log of this speech's sound.

        Raises PagemillError for a log that another vocoder has begun.
        """
        self._spec = spec
        self._vocoder = vocoder
        made = [record for record in records if isinstance(record, AudioChunk)]
        self.num_samples = made[-1].first_sample + made[-1].num_samples if made else 0
        """The samples that are in the log."""
        rates = {record.sample_rate for record in made}
        if rates - {vocoder.sample_rate} or self._is_foreign:
            raise PagemillError("another vocoder has begun this sound, so it cannot go on")
        self.codes: Codes = np.empty((0, vocoder.num_codebooks), np.int32)
        """All frames so far. The array is never changed, but replaced."""
        self._spoken: list[tuple[int, int]] = []
        """Numbers of frames, and of the tokens of the text that they speak."""
        self.is_complete = False
        """Whether there will be no more frames."""

    @property
    def _is_foreign(self) -> bool:
        """Whether the samples are no whole frames, of which only the last one is shorter."""
        rest = -self.num_samples % self._vocoder.samples_per_frame
        return rest not in (0, self._vocoder.num_missing)

    def add(self, chunk: CodeChunk) -> None:
        """Add the frames of the next record. Raises PagemillError for frames that do not fit."""
        vocoder, position = self._vocoder, chunk.position
        if position != len(self.codes):
            raise PagemillError(f"frame {len(self.codes)} is missing: frame {position} came next")
        for number, frame in enumerate(chunk.frames, position):
            if len(frame) != vocoder.num_codebooks:
                raise PagemillError(
                    f"frame {number} has {len(frame)} codes, the vocoder takes"
                    f" {vocoder.num_codebooks}"
                )
            if not all(0 <= code < vocoder.num_codes for code in frame):
                raise PagemillError(
                    f"frame {number} has codes outside of 0 to {vocoder.num_codes - 1}"
                )
        if chunk.frames:
            self.codes = np.concatenate([self.codes, np.array(chunk.frames, np.int32)])
        if chunk.end_token is not None:
            self._spoken.append((len(self.codes), chunk.end_token))

    def end_token_at(self, num_frames: int) -> int | None:
        """Tokens of the text that are spoken after so many frames; None if that is not known."""
        return interpolate(self._spoken, num_frames) if self._spoken else None

    def next_window(self) -> Window | None:
        """The window of the next chunk; None until its frames are there, and at the end."""
        # The last frame may have fewer samples than the others.
        start = -(-self.num_samples // self._vocoder.samples_per_frame)
        return window_at(self._spec, start, len(self.codes), is_complete=self.is_complete)


class Playback:
    """When the client of a speech has played what it has, if it plays without waiting."""

    def __init__(self, now_s: float) -> None:
        self.dry_at_s = now_s
        """Until the first samples, when the client began to wait."""
        self._has_begun = False

    def add(self, length_s: float, now_s: float) -> float:
        """Note sound that the client has from now on; return how long it had waited for it.

        The wait for the first samples is no gap in the sound, and counts as none.
        """
        gap_s = max(0.0, now_s - self.dry_at_s) if self._has_begun else 0.0
        self._has_begun = True
        self.dry_at_s = max(now_s, self.dry_at_s) + length_s
        return gap_s
