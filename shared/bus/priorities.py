"""Priorities of the pulls of workers that share slots. Pure; `ops.simulate` uses it too."""

NUM_PRIORITIES = 10
"""Number of priorities of pulls. The broker serves the lowest priority first."""
FIRST_THIEF = 5
"""Priority of the pulls of an idle worker that is not the owner."""
BUSY = 0.5
"""Load of an owner beyond which idle workers are served before it."""


def load_of(used: float, num_ahead: float, num_saved: float) -> float:
    """Return the load of a worker, from 0 to 1.

    `used` is the used part of its sequences, `num_ahead` the number of prompt tokens that it has to
    compute first, and `num_saved` the number of tokens that its cache saves for a request. An owner
    with more tokens ahead than saved ones is busy, because waiting for it costs more than a cache
    hit saves.
    """
    return max(used, num_ahead / max(1.0, num_ahead + num_saved))


def priority_of(load: float, *, is_owner: bool) -> int:
    """Return the priority of a pull, from 0 to 9."""
    if is_owner:
        return 0 if load <= BUSY else FIRST_THIEF + 1
    num_levels = NUM_PRIORITIES - FIRST_THIEF
    return FIRST_THIEF + min(num_levels - 1, int(num_levels * load))
