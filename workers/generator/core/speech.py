"""State of one request: its frames so far, its next chunk, and the playback of its client."""

import numpy as np

from shared.errors import PagemillError
from shared.protocol.chunks import ChunkSpec, interpolate
from shared.protocol.records import AnyRecord, AudioChunk, CodeChunk
from workers.generator.core.schedule import Window, window_at
from workers.generator.core.vocoder import Codes, Vocoder


class Speech:
    """Collects the frames of one speech, and returns the window of the next chunk.

    The start of a chunk follows from the number of samples in the log, so the log is the only state
    that another attempt needs.
    """

    def __init__(self, spec: ChunkSpec, vocoder: Vocoder, records: list[AnyRecord]) -> None:
        """`records` are the records in the log of this speech's sound.

        Raises PagemillError for a log that was begun by another vocoder.
        """
        self._spec = spec
        self._vocoder = vocoder
        chunks = [record for record in records if isinstance(record, AudioChunk)]
        self.num_samples = chunks[-1].first_sample + chunks[-1].num_samples if chunks else 0
        """Number of samples in the log."""
        rates = {chunk.sample_rate for chunk in chunks}
        if rates - {vocoder.sample_rate} or self._is_foreign:
            raise PagemillError(
                "this sound was begun by another vocoder, so this one cannot continue it"
            )
        self.codes: Codes = np.empty((0, vocoder.num_codebooks), np.int32)
        """All frames so far. The array is replaced, never changed in place."""
        self._spoken: list[tuple[int, int]] = []
        """Pairs of a number of frames and the number of tokens of the text spoken by then."""
        self.is_complete = False
        """Whether there will be no more frames."""

    @property
    def _is_foreign(self) -> bool:
        """Whether the samples are not whole frames, apart from the missing samples of the last."""
        rest = -self.num_samples % self._vocoder.samples_per_frame
        return rest not in (0, self._vocoder.num_missing)

    def add(self, chunk: CodeChunk) -> None:
        """Add the frames of the next record. Raises PagemillError for frames that do not fit."""
        vocoder, position = self._vocoder, chunk.position
        if position != len(self.codes):
            raise PagemillError(
                f"frame {len(self.codes)} is missing: the next record begins at frame {position}"
            )
        for number, frame in enumerate(chunk.frames, position):
            if len(frame) != vocoder.num_codebooks:
                raise PagemillError(
                    f"frame {number} has {len(frame)} codes, but the vocoder needs"
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
        """Return the number of tokens spoken after `num_frames` frames; None if unknown."""
        return interpolate(self._spoken, num_frames) if self._spoken else None

    def next_window(self) -> Window | None:
        """Return the window of the next chunk; None until it has its frames, and at the end."""
        # The last frame may have fewer samples than the others.
        start = -(-self.num_samples // self._vocoder.samples_per_frame)
        return window_at(self._spec, start, len(self.codes), is_complete=self.is_complete)


class Playback:
    """Estimated playback of a speech by its client, which plays sound as soon as it arrives."""

    def __init__(self, now_s: float) -> None:
        self.dry_at_s = now_s
        """Time at which the client has played all sound; before the first samples, the time at
        which it began to wait."""
        self._has_begun = False

    def add(self, length_s: float, now_s: float) -> float:
        """Record sound that the client receives now; return the length of the gap before it.

        The wait for the first samples does not count as a gap.
        """
        gap_s = max(0.0, now_s - self.dry_at_s) if self._has_begun else 0.0
        self._has_begun = True
        self.dry_at_s = max(now_s, self.dry_at_s) + length_s
        return gap_s
