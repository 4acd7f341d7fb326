"""Orders for batches: the endpoints that lines may call, and completion windows. Pure."""

import re

from shared.errors import InvalidRequest

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/transcriptions",
    "/v1/audio/speech",
)
"""Endpoints that the lines of a batch may call."""

_WINDOW = re.compile(r"([1-9][0-9]{0,6})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}


def check_endpoint(endpoint: str) -> None:
    """Raises InvalidRequest."""
    if endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")


def parse_window(window: str, max_window_h: int) -> int:
    """Return the seconds of a completion window such as `24h`. Raises InvalidRequest."""
    match = _WINDOW.fullmatch(window)
    seconds = 0 if match is None else int(match[1]) * _UNIT_S[match[2]]
    if not 0 < seconds <= 3600 * max_window_h:
        raise InvalidRequest(
            "completion_window must be a number with m, h or d, such as 24h, of at most"
            f" {max_window_h}h (batch.max_window_h)",
            field="completion_window",
        )
    return seconds
