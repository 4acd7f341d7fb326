"""Limit on rotary positions: those of a video grow with its seconds as well as its tokens."""

from shared.errors import InvalidRequest

MAX_GRID_SECONDS = 1e6
"""Most seconds from one pair of frames to the next: positions stay far from limits of integers."""


def check_reach(largest: int, num_positions: int, subject: str, field: str) -> None:
    """Raise InvalidRequest, naming `field`, if a model has no position `largest`."""
    if largest >= num_positions:
        raise InvalidRequest(
            f"{subject} position {largest}, and the model has positions from 0 to"
            f" {num_positions - 1}; send a shorter video, or one with fewer seconds from frame to"
            " frame (a higher fps, or a smaller second_per_grid_ts)",
            field=field,
        )
