"""Limit on rotary positions. The positions of a video depend on its seconds and its tokens."""

from typing import Any

from shared.errors import InvalidRequest

MAX_GRID_SECONDS = 1e6
"""Limit on the seconds between pairs of frames. It keeps positions far below integer limits."""


def positions_per_second(config: Any) -> float:
    """Return the number of positions per second, for a model with positions that depend on time."""
    # The key has another name in thinkers of omni models.
    rate = getattr(config, "position_id_per_seconds", None)
    return float(config.vision_config.tokens_per_second if rate is None else rate)


def count_positions(text_config: Any) -> int:
    """Return the number of positions of a decoder."""
    # Encoder-decoder models name the positions of both parts.
    names = ("max_position_embeddings", "max_target_positions")
    return int(next(getattr(text_config, name) for name in names if hasattr(text_config, name)))


def check_reach(largest: int, num_positions: int, subject: str, field: str) -> None:
    """Raise InvalidRequest, naming `field`, if a model has no position `largest`."""
    if largest >= num_positions:
        raise InvalidRequest(
            f"{subject} position {largest}, but the model's positions end at {num_positions - 1};"
            " send a shorter video, or one with fewer seconds between its frames (a higher fps, or"
            " a smaller second_per_grid_ts)",
            field=field,
        )


def check_time(
    num_pairs: int, seconds: float, positions_per_s: float, num_positions: int, field: str
) -> None:
    """Raise InvalidRequest, naming `field`, for a video beyond the last position of the model.

    The engine checks the sum with the positions of the prompt before the video.
    """
    if not 0 <= seconds <= MAX_GRID_SECONDS:
        raise InvalidRequest(
            f"second_per_grid_ts is {seconds:g}, not between 0 and {MAX_GRID_SECONDS:g}",
            field=field,
        )
    largest = int((num_pairs - 1) * seconds * positions_per_s)
    subject = f"{num_pairs} pairs of frames, {seconds:g} seconds each (second_per_grid_ts), reach"
    check_reach(largest, num_positions, subject, field)
