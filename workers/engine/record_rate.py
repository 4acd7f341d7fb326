"""Rate of records that their measured cost allows. The module has no clock."""

MAX_SHARE = 2 / 3
"""Share of the time in which records are written, unless the lowest rate needs more."""
MIN_RATE = 0.2
"""Lowest rate, as a share of the limit."""
NUM_REMEMBERED = 64
"""Number of records after which the records before them count half."""


class RecordRate:
    """Rate at which records may be written, by the time that earlier records have taken.

    The time from an append to its acknowledgement contains the work of this process, of the broker
    and of its disk, and the wait for other work of theirs. The time of several appends at once
    counts once.
    """

    def __init__(self, limit_per_s: float) -> None:
        self._limit_per_s = limit_per_s
        self._num_under_way = 0
        self._counted_s = 0.0
        # The rate is the lowest before the first measurement.
        self._num_written = 1.0
        self._busy_s = MAX_SHARE / (MIN_RATE * limit_per_s)

    def begin(self, now_s: float) -> None:
        """Begin an append. `now_s` never decreases, and neither does the argument of `end`."""
        if self._num_under_way == 0:
            self._counted_s = now_s
        self._num_under_way += 1

    def end(self, now_s: float) -> None:
        """End an append that was begun."""
        self._busy_s += now_s - self._counted_s
        self._counted_s = now_s
        self._num_under_way -= 1
        self._num_written += 1
        if self._num_written > NUM_REMEMBERED:
            self._num_written /= 2
            self._busy_s /= 2

    @property
    def per_s(self) -> float:
        """Records per second, at most the limit."""
        affordable = MAX_SHARE * self._num_written / self._busy_s
        return min(self._limit_per_s, max(MIN_RATE * self._limit_per_s, affordable))
