"""Priorities of the pulls of workers that share slots. Pure; `ops.simulate` uses it too."""

NUM_PRIORITIES = 10
"""Priorities of pulls; the broker serves the lowest first."""
FIRST_THIEF = 5
"""Priority of the pulls of an idle worker that is not the owner."""
BUSY = 0.5
"""Load of an owner beyond which idle workers are served before it."""


def load_of(used: float, num_ahead: float, num_saved: float) -> float:
    """Return the load of a worker, from 0 to 1.

    `used` is the part of its sequences in use, `num_ahead` the prompt tokens that it has to compute
    before others, and `num_saved` those that its cache saves with a request. An owner with more
    tokens ahead than it saves is busy: a wait would cost more than a hit is worth.
    """
    return max(used, num_ahead / max(1.0, num_ahead + num_saved))


def priority_of(load: float, *, is_owner: bool) -> int:
    """Return the priority of a pull, from 0 to 9."""
    if is_owner:
        return 0 if load <= BUSY else FIRST_THIEF + 1
    num_levels = NUM_PRIORITIES - FIRST_THIEF
    return FIRST_THIEF + min(num_levels - 1, int(num_levels * load))
