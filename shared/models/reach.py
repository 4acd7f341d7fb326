"""Limit on rotary positions: those of a video grow with its seconds as well as its tokens."""

from typing import Any

from shared.errors import InvalidRequest

MAX_GRID_SECONDS = 1e6
"""Most seconds from one pair of frames to the next: positions stay far from limits of integers."""


def positions_per_second(config: Any) -> float:
    """Return the number of positions of a second in a model whose positions depend on the time."""
    # The thinkers of omni models name it differently.
    rate = getattr(config, "position_id_per_seconds", None)
    return float(config.vision_config.tokens_per_second if rate is None else rate)


def check_reach(largest: int, num_positions: int, subject: str, field: str) -> None:
    """Raise InvalidRequest, naming `field`, if a model has no position `largest`."""
    if largest >= num_positions:
        raise InvalidRequest(
            f"{subject} position {largest}, and the model has positions from 0 to"
            f" {num_positions - 1}; send a shorter video, or one with fewer seconds from frame to"
            " frame (a higher fps, or a smaller second_per_grid_ts)",
            field=field,
        )


def check_time(
    num_pairs: int, seconds: float, positions_per_s: float, num_positions: int, field: str
) -> None:
    """Raise InvalidRequest, naming `field`, for a video longer than the model has positions.

    The prompt before a video adds to its positions: the engine checks the sum.
    """
    if not 0 <= seconds <= MAX_GRID_SECONDS:
        raise InvalidRequest(
            f"second_per_grid_ts is {seconds:g}, not between 0 and {MAX_GRID_SECONDS:g}",
            field=field,
        )
    largest = int((num_pairs - 1) * seconds * positions_per_s)
    subject = f"{num_pairs} pairs of frames, {seconds:g} seconds each (second_per_grid_ts), reach"
    check_reach(largest, num_positions, subject, field)
