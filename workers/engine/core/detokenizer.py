"""Token ids one by one into pieces of text, which end before the first stop string.

A function of the tokens alone: whoever pushes the same tokens again arrives at the same state, so
that a resumed answer goes on with the very character that follows the last one given out.
"""

from collections.abc import Callable

# A character has at most 4 bytes, hence at most 3 tokens wait for their fourth. Twice that and
# more is no character in the making but junk, which must not make every token dearer than the last.
MAX_HELD_TOKENS = 16

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Of all stop strings the one that is complete first counts, and then the longest.

    With `include_stop` it is the end of the text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: list[str], include_stop: bool = False
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        # Tokens [0, num_read) are out as text and stay as context, as a tokenizer may write the
        # first token of a text in another way than a later one; [num_read, end) are not out yet.
        self._window: list[int] = []
        self._num_read = 0
        self._held = ""
        """Text that may yet become a stop string."""
        self._num_exempt = 0
        """Characters at its beginning within which no stop string counts."""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that ends it, if any: not one that ends
        in the text of a token that may not stop."""
        self._window.append(token_id)
        self._held += self._read_window()
        if not may_stop:
            self._num_exempt = len(self._held)
        matched = self._cut()
        num_sure = len(self._held) - (0 if matched else _overlap(self._held, self._stop))
        text, self._held = self._held[:num_sure], self._held[num_sure:]
        self._num_exempt = max(0, self._num_exempt - num_sure)
        return text, matched

    def finish(self) -> str:
        """What was held back: no more tokens follow."""
        self._held += self._new_text()
        self._cut()
        text, self._held = self._held, ""
        self._window.clear()
        self._num_read = 0
        return text

    def _new_text(self) -> str:
        context = self._decode(self._window[: self._num_read])
        return self._decode(self._window)[len(context) :]

    def _read_window(self) -> str:
        text = self._new_text()
        num_unread = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and num_unread < MAX_HELD_TOKENS:
            return ""
        if text:
            del self._window[: self._num_read]
            self._num_read = num_unread
        else:
            # Special tokens write nothing, and would push the context out of the window.
            del self._window[self._num_read :]
        return text

    def _cut(self) -> str | None:
        """End the held text, and all text, before a stop string in it, or behind it."""
        places = [(self._find(stop), stop) for stop in self._stop]
        found = [(start, stop) for start, stop in places if start >= 0]
        if not found:
            return None
        start, matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
        self._held = self._held[: start + len(matched) if self._include_stop else start]
        self._window.clear()
        self._num_read = 0
        return matched

    def _find(self, stop: str) -> int:
        """Where it begins in the held text, -1 if nowhere."""
        return self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))


def _overlap(text: str, stop: list[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = max((len(s) for s in stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
