"""Rate at which the tokens of an answer arrive."""

from dataclasses import dataclass

# The rate of fewer tokens says more about the clock than about the model.
MIN_TOKENS = 16


@dataclass(slots=True)
class TokenRate:
    """Count of the text tokens of an answer, and the times of the first and the last."""

    num_tokens: int = 0
    num_first: int = 0
    """Tokens that arrived together with the first one."""
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, num_tokens: int, at_s: float) -> None:
        """Count tokens that arrived together at a time of a monotonic clock."""
        if not self.num_tokens:
            self.num_first, self.first_s = num_tokens, at_s
        self.num_tokens += num_tokens
        self.last_s = at_s

    def __str__(self) -> str:
        """Return the tokens per second between the first and the last; `-` for too few tokens."""
        seconds = self.last_s - self.first_s
        if self.num_tokens < MIN_TOKENS or seconds <= 0:
            return "-"
        return f"{(self.num_tokens - self.num_first) / seconds:.0f}"
